"""However the demo ends before it has begun: one line at most, and nothing is left running."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.processes import first_of, left_behind
from tests.harness.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.starts_others]
ROOT = Path(__file__).parents[3]
STANDIN = Path(__file__).with_name("standin_demo.py")
MARK = "ROSE_TEST_RUN"
# The guest waits for its host, which never comes.
ENGINES = 2


@contextmanager
def demo(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    options = ("demo", f"--out={folder / 'run'}", f"--port-base={first_of(32)}")
    with subprocess.Popen(
        [sys.executable, str(STANDIN), str(folder), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def started(folder: Path) -> int:
    journal = folder / "journal"
    lines = journal.read_text().splitlines() if journal.exists() else []
    return sum(json.loads(line)["call"] == "start" for line in lines)


def test_ctrl_c_while_engines_start_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mute").touch()
    with demo(tmp_path) as process:
        until(lambda: started(tmp_path) == ENGINES, 60, "both engines are starting", every_s=0.02)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert left_behind(MARK, str(tmp_path)) == []


def test_an_engine_that_dies_at_start_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "mute").touch()
    (tmp_path / "dies").touch()
    with demo(tmp_path) as process:
        printed, _ = process.communicate(timeout=90)
    assert process.returncode == 2, printed
    last = printed.strip().splitlines()[-1]
    assert last.startswith("rose: ")
    assert "host" in last
    assert "ValueError: no such model" in last
    assert "Traceback" not in printed
    assert left_behind(MARK, str(tmp_path)) == []
