"""Content of an engine's step log, which is written only on request."""

import errno
import os
from pathlib import Path

import pytest

from executor.errors import PageError
from executor.step_log import (
    ARRIVAL,
    HEADER,
    RECORD,
    STEP,
    STEP_LOG,
    StepLog,
    StepRecord,
    read_step_log,
    used_bytes,
)


def test_records_come_back_as_written_before_anybody_closes_the_log(tmp_path: Path) -> None:
    cpu_ns = iter((100, 160, 200))
    log = StepLog(tmp_path / "log", capacity=8, thread_ns=lambda: next(cpu_ns))
    log.begin()
    log.step(10, 90, tokens=7, sequences=3, sampled=2)
    log.step(90, 120, tokens=5, sequences=3)
    log.arrival(95, 96, prompt_tokens=40)
    raw = (tmp_path / "log").read_bytes()
    expected = [
        StepRecord(STEP, 10, 90, 60, 7, 3, 2),
        StepRecord(STEP, 90, 120, 40, 5, 3, 0),
        StepRecord(ARRIVAL, 95, 96, 0, 40, 1, 0),
    ]
    assert read_step_log(raw) == expected
    cut = raw[: used_bytes(raw[: HEADER.size])]
    assert len(cut) == HEADER.size + 3 * RECORD.size
    assert read_step_log(cut) == expected


def test_a_full_log_takes_no_more(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "log", capacity=2)
    for moment in range(5):
        log.arrival(moment, moment, 1)
    assert [r.begin_ns for r in read_step_log((tmp_path / "log").read_bytes())] == [0, 1]


def test_only_a_named_folder_gets_a_log_and_no_log_is_overwritten(tmp_path: Path) -> None:
    assert StepLog.from_environ({}, "host") is None
    environ = {STEP_LOG: str(tmp_path)}
    assert StepLog.from_environ(environ, "host") is not None
    assert len(list(tmp_path.glob("steps-host-*.bin"))) == 1
    with pytest.raises(PageError, match="step log"):
        StepLog.from_environ(environ, "host")


@pytest.mark.parametrize("raw", [b"", b"x" * 64, HEADER.pack(b"ROSESTEP", 1, 9, 2)])
def test_what_is_no_whole_log_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="step log"):
        read_step_log(raw)


def test_an_engine_on_a_full_disk_goes_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert StepLog.from_environ({"ROSE_STEP_LOG": str(tmp_path)}, "host") is None
    assert list(tmp_path.iterdir()) == []
    assert "logs no steps" in caplog.text
