"""The kill switch gives everything back within the deadline, with and without a control plane."""

import logging
from pathlib import Path

import pytest

from bench.kill.__main__ import trials

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]
TRIALS = 2
GUEST_BYTES = 64 << 20
DEADLINE_S = 5.0
log = logging.getLogger("kill")


def test_all_is_given_back_in_time_and_a_second_press_changes_nothing(tmp_path: Path) -> None:
    done = list(trials(tmp_path, TRIALS, DEADLINE_S, GUEST_BYTES))
    for trial in done:
        log.info("%s", trial)
    assert [trial.plane for trial in done] == ["up"] * TRIALS + ["down"] * TRIALS
    assert all(trial.held_bytes >= GUEST_BYTES for trial in done), "it held its memory"
    assert all(trial.in_time for trial in done), done
    assert [trial.again for trial in done] == [""] * len(done)
