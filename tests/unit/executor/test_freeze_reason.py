"""An operator reads why a guest stands still, whoever said it."""

import pytest

from executor import FreezeReason, Grant, GuestState, explained
from executor.control_page.seqlock_records import REASON_BYTES


@pytest.mark.parametrize("reason", FreezeReason)
def test_every_reason_fits_the_page_and_has_a_sentence(reason: FreezeReason) -> None:
    assert len(reason.encode()) <= REASON_BYTES
    assert Grant.unpack(Grant(reason=reason).pack()).reason == reason
    assert GuestState.unpack(GuestState(gate_reason=reason).pack()).gate_reason == reason
    assert reason.sentence
    assert "\n" not in reason.sentence


def test_a_word_is_explained_and_one_of_another_build_stands_alone() -> None:
    assert explained("host_dead") == "host_dead (the host's process is gone)"
    assert explained("no_slack") == (
        "no_slack (the host has a deadline that the next step could make it miss)"
    )
    assert explained("moon_phase") == "moon_phase"
