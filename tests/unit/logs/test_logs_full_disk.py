"""Logs whose disk takes nothing: nobody hears of it but the log itself."""

import json
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.errors import ConfigError, RoseError
from rose.logs.eventlog import EventLog, JsonlLog, Logs, read_lines
from rose.logs.process_log import AsideHandler
from rose.logs.rotating_jsonl import (
    BoundedFile,
    LogLimits,
    LogThread,
    log_parts,
    trim_output,
)
from tests.harness.waiting import HandClock

FULL = Path("/dev/full")
SMALL = LogLimits(file_bytes=4 << 10, files=3)


class NumberedRecord(msgspec.Struct):
    n: int


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size`: as a disk that is full does, in mid-line too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def line(n: int) -> bytes:
    return b'{"n":%d}\n' % n


def test_a_full_disk_costs_records_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "full.jsonl").symlink_to(FULL)
    log = JsonlLog(tmp_path / "full.jsonl")
    for n in range(5):
        log.write({"n": n})
    log.close()
    assert log.dropped == 5
    assert "No space left on device" in log.trouble


def test_an_outage_is_said_once_and_its_losses_are_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "x.jsonl", HandClock()
    file = BoundedFile(path, SMALL, {"source": "n0"}, clock)
    file.append(line(0))
    path.unlink()
    path.symlink_to(FULL)
    clock.now_s += 5.0
    for n in range(1, 5):
        file.append(line(n))
    assert file.dropped == 4
    path.unlink()
    file.append(line(5))
    assert not path.exists(), "a file that failed is left alone for a while"
    clock.now_s += 5.0
    file.append(line(6))
    missing, last = lines_of(path)
    assert missing["records_dropped"] == 5
    assert missing["source"] == "n0"
    assert "No space left" in missing["message"]
    assert last == {"n": 6}
    assert file.trouble == ""
    assert len(caplog.records) == 2, "one line when it begins and one when it is over"


def test_half_a_line_is_taken_back_when_the_disk_gets_full_in_the_middle(tmp_path: Path) -> None:
    path, clock = tmp_path / "x.jsonl", HandClock()
    file = BoundedFile(path, SMALL, {}, clock)
    file.append(line(1))
    with file_limit(len(line(1)) + 3):
        file.append(line(2))
    assert path.read_bytes() == line(1)
    clock.now_s += 5.0
    file.append(line(3))
    assert [each.get("n") for each in lines_of(path)] == [1, None, 3]


def test_what_a_killed_writer_left_does_not_spoil_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(line(1) + b'{"n":')
    with JsonlLog(path) as log:
        log.write({"n": 2})
    assert [each.n for each in read_lines(path, NumberedRecord)] == [1, 2]


def test_a_folder_that_goes_away_is_made_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "logs" / "x.jsonl", HandClock()
    file = BoundedFile(path, SMALL, {}, clock)
    file.append(line(1))
    path.unlink()
    path.parent.rmdir()
    clock.now_s += 5.0
    file.append(line(2))
    assert lines_of(path) == [{"n": 2}]


def test_missing_records_are_an_error_to_whoever_computes_from_them(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    file = BoundedFile(path, SMALL, {})
    file.append(line(1))
    file.drop()
    file.drop()
    file.append(line(2))
    with pytest.raises(RoseError, match=r"x\.jsonl:2: records are missing: 2 "):
        read_lines(path, NumberedRecord)


@pytest.mark.parametrize(
    ("limits", "parts"),
    [
        (SMALL, ["x.jsonl.2", "x.jsonl.1", "x.jsonl"]),
        (LogLimits(file_bytes=None), ["x.jsonl"]),
    ],
)
def test_a_log_stays_within_its_size_and_is_read_in_order(
    tmp_path: Path, limits: LogLimits, parts: list[str]
) -> None:
    path = tmp_path / "x.jsonl"
    with JsonlLog(path, limits) as log:
        for n in range(2_000):
            log.write({"n": n})
    assert [part.name for part in log_parts(path)] == parts
    kept = [each.n for each in read_lines(path, NumberedRecord)]
    assert kept == list(range(kept[0], 2_000))
    assert log.dropped == 0
    if limits.file_bytes is None:
        assert kept[0] == 0
    else:
        assert all(part.stat().st_size <= limits.file_bytes for part in log_parts(path))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(
            lambda folder: folder.chmod(0o500),
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere"),
            id="may not be written",
        ),
        pytest.param(lambda folder: (folder / "logs").touch(), id="a file in its place"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_at_start(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(tmp_path)
    with pytest.raises(ConfigError, match="logs cannot be kept"):
        Logs(tmp_path / "logs")


def test_a_name_is_not_taken_for_a_part_of_another(tmp_path: Path) -> None:
    for name in ("x.jsonl", "x.jsonl.1", "x.jsonl.10", "x.jsonl.2", "x.jsonl.bak", "ax.jsonl.1"):
        (tmp_path / name).touch()
    names = [part.name for part in log_parts(tmp_path / "x.jsonl")]
    assert names == ["x.jsonl.10", "x.jsonl.2", "x.jsonl.1", "x.jsonl"]


def test_logs_are_for_their_user_alone(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "a" / "b")
    logs.events("n0").write("began")
    logs.close()
    modes = [
        (tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/events-n0.jsonl")
    ]
    assert modes == [0o700, 0o700, 0o600]


def test_a_disk_that_hangs_holds_no_writer_up(tmp_path: Path) -> None:
    hangs = threading.Event()
    thread = LogThread("test", waiting=3)
    log = JsonlLog(tmp_path / "x.jsonl", thread=thread)
    assert thread.flush(30)
    began = threading.Event()
    thread.put(lambda: (began.set(), hangs.wait(30)))
    assert began.wait(30)
    for n in range(10):
        log.write({"n": n})
    assert log.dropped == 7
    hangs.set()
    log.close()
    thread.close(30)
    written = lines_of(tmp_path / "x.jsonl")
    assert [each.get("records_dropped", each.get("n")) for each in written] == [7, 0, 1, 2]


def test_logs_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    (tmp_path / "events-n0.jsonl").symlink_to(FULL)
    logs = Logs(tmp_path)
    events, fine = logs.events("n0"), logs.records("fine.jsonl")
    events.write("began")
    fine.write({"n": 1})
    assert logs.flush(30)
    assert logs.dropped == 1
    assert logs.troubles() == ["log events-n0.jsonl: No space left on device"]
    logs.close()


def test_a_field_that_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    events = EventLog(tmp_path, "n0")
    events.write("odd", where=Path("/x"))
    events.close()
    assert lines_of(tmp_path / "events-n0.jsonl")[0]["where"] == "/x"


def test_a_child_that_writes_without_end_is_bounded_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    with path.open("ab", buffering=0) as child:
        child.write(b"x" * 5_000 + b"the end")
        assert trim_output(path, SMALL)
        child.write(b"more")
    assert path.read_bytes() == b"more"
    kept = (tmp_path / "engine.log.1").read_bytes()
    assert len(kept) == SMALL.file_bytes
    assert kept.endswith(b"the end")
    assert not trim_output(path, SMALL)


def test_a_reader_of_standard_error_that_hangs_holds_nobody_up() -> None:
    hangs, said = threading.Event(), []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            hangs.wait(30)
            said.append(record.getMessage())

    handler = AsideHandler(Slow())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    for n in range(3):
        logger.warning("line %d", n)
    assert said == []
    hangs.set()
    handler.close()
    assert said == ["line 0", "line 1", "line 2"]


def test_a_listener_that_raises_fails_no_event(tmp_path: Path) -> None:
    def breaks(event: str, fields: Mapping[str, object]) -> None:
        raise KeyError(event)

    events = EventLog(tmp_path, "n0")
    events.listen(breaks)
    events.write("began")
    events.close()
    assert lines_of(tmp_path / "events-n0.jsonl")[0]["event"] == "began"


def test_a_log_without_records_is_there_and_empty(tmp_path: Path) -> None:
    JsonlLog(tmp_path / "x.jsonl").close()
    assert read_lines(tmp_path / "x.jsonl", NumberedRecord) == []
    with pytest.raises(RoseError, match="is the run complete"):
        read_lines(tmp_path / "y.jsonl", NumberedRecord)
