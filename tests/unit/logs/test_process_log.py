"""Records that a collector of logs keeps: wall-clock times, one JSON object a line."""

import asyncio
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rose.cli.main import main
from rose.clock import utc_text
from rose.errors import ConfigError
from rose.logs.eventlog import EventLog, JsonlLog
from rose.logs.process_log import announce, repeat, start_logging
from rose.scheduler.core.usage import Lent, UsageLog
from rose.security.audit_log import AuditLog, sealed

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def an_event(folder: Path) -> Path:
    events = EventLog(folder, "node-0")
    events.write("lease_granted", replica="guest-0")
    events.close()
    return folder / "events-node-0.jsonl"


def a_loss(folder: Path) -> Path:
    log = JsonlLog(folder / "x.jsonl")
    log._file.drop()
    log.close()
    return folder / "x.jsonl"


def an_audit_record(folder: Path) -> Path:
    log = AuditLog(folder / "audit-s.jsonl", "s")
    log.write("lease_granted", {"replica": "guest-0"})
    log.close()
    return folder / "audit-s.jsonl"


def a_usage_record(folder: Path) -> Path:
    with JsonlLog(folder / "usage.jsonl") as log:
        UsageLog(log.write).take({("chat", "grpo"): Lent(1.0, 1.0, 1.0, 1)}, 1_795_709_544.1239)
    return folder / "usage.jsonl"


@pytest.mark.parametrize("written", [an_event, a_loss, an_audit_record, a_usage_record])
def test_every_record_has_its_wall_clock_time(
    tmp_path: Path, written: Callable[[Path], Path]
) -> None:
    (line,) = written(tmp_path).read_text().splitlines()
    record: dict[str, Any] = json.loads(line)
    assert RFC_3339.fullmatch(record["time"])
    assert {"t_s", "t"} & record.keys(), "the times that readers had before stay"


def test_a_time_is_written_in_utc_with_milliseconds() -> None:
    assert utc_text(1_795_709_544.1239) == "2026-11-26T16:12:24.123Z"
    for none in (float("nan"), float("inf"), 1e300, -1e12):
        with pytest.raises(ValueError, match=r"year|time|NaN"):
            utc_text(none)


@contextmanager
def fresh() -> Iterator[None]:
    """Logging as a process finds it at its start, without pytest's handlers."""
    root, records = logging.getLogger(), logging.getLogger("records")
    levels = root.level, records.level
    passes_on = records.propagate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root, "handlers", [])
        patch.setattr(sys, "excepthook", sys.__excepthook__)
        for name in ("ROSE_LOG_LEVEL", "ROSE_LOG_FORMAT"):
            patch.delenv(name, raising=False)
        yield
        written()
        logging.captureWarnings(capture=False)
    root.setLevel(levels[0])
    records.setLevel(levels[1])
    records.propagate = passes_on


def written() -> None:
    """Wait for the thread that writes the log."""
    for handler in logging.getLogger().handlers:
        handler.close()


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    written()
    out, err = capsys.readouterr()
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


@fresh()
def test_each_line_is_one_json_object_whoever_logs_it(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("node", ["--config", "node.json", "--log-format", "json"])
    logging.getLogger("rose.node").warning("run_dir %s\nis on a disk", "/run")
    logging.getLogger("uvicorn.error").info("Started")
    asyncio.run(asyncio.sleep(0))
    try:
        raise ValueError("torn")
    except ValueError:
        logging.getLogger("asyncio").exception("task died")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    announce("rose node", "listening")
    said = lines_of(capsys)
    assert [(each["level"], each["logger"]) for each in said] == [
        ("warning", "rose.node"),
        ("info", "uvicorn.error"),
        ("error", "asyncio"),
        ("warning", "py.warnings"),
        ("info", "rose"),
    ]
    assert {each["component"] for each in said} == {"node"}
    assert all(RFC_3339.fullmatch(each["time"]) for each in said)
    assert said[0]["message"] == "run_dir /run\nis on a disk"
    assert "ValueError: torn" in said[2]["exception"]


@fresh()
def test_records_of_files_are_repeated_with_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logging("scheduler", ["--log-format=json"])
    event = json.loads(an_event(tmp_path).read_text())
    audit = json.loads(an_audit_record(tmp_path).read_text())
    repeat("usage")({"time": "2026-11-26T16:12:24.123Z", "tokens": float("nan"), "level": "x"})
    seen = {each["logger"]: each for each in lines_of(capsys)}
    assert seen["records.events"]["event"] == "lease_granted"
    for logger, record in (("events", event), ("audit", audit)):
        same = seen[f"records.{logger}"]
        whole = {"time": same["time"], "event": same["event"], **same["fields"]}
        assert whole == record
    body = {name: whole[name] for name in record if name not in ("prev", "hash")}
    _, digest = sealed(body, whole["prev"])
    assert digest == whole["hash"], "the chain can be checked in the collector's copy"
    usage = seen["records.usage"]
    assert (usage["level"], usage["time"]) == ("info", "2026-11-26T16:12:24.123Z")
    assert usage["fields"] == {"tokens": "NaN", "level": "x"}


@fresh()
@pytest.mark.parametrize(
    ("words", "environment", "shown"),
    [
        ([], {}, {"info", "warning", "error"}),
        (["--log-level", "warning"], {}, {"warning", "error"}),
        (["--log-level=error"], {"ROSE_LOG_LEVEL": "debug"}, {"error"}),
        ([], {"ROSE_LOG_LEVEL": "debug"}, {"debug", "info", "warning", "error"}),
        ([], {"ROSE_LOG_LEVEL": ""}, {"info", "warning", "error"}),
    ],
)
def test_a_level_hides_what_is_below_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    environment: dict[str, str],
    shown: set[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    start_logging("gateway", words)
    for level in ("debug", "info", "warning", "error"):
        logging.getLogger("rose.x").log(getattr(logging, level.upper()), "said")
    an_event(tmp_path)
    written()
    out, err = capsys.readouterr()
    assert {line.split()[2].lower() for line in err.splitlines()} == shown
    assert out == "", "with text the records of files stay in their files"


ENDS = {
    "scheduler": ["--store", "s", "--log-dir", "l", "--port", "99999"],
    "gateway": ["--port", "99999"],
    "node": ["--config", "missing.json"],
    "front": ["--port", "99999"],
    "relay": ["--store", "s", "--origin", "http://o", "--job", "j", "--port", "1"],
    "publish": ["--watch", "missing"],
}


@fresh()
@pytest.mark.parametrize("command", ENDS)
def test_every_process_logs_json_from_its_first_line_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *ENDS[command], "--log-format", "json"]) == 2
    (line,) = lines_of(capsys)
    assert (line["level"], line["component"]) == ("error", command)
    assert line["message"]


@fresh()
def test_a_wrong_level_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["gateway", "--port", "1", "--log-level", "loud"]) == 2
    assert "there is no 'loud'; choose from debug, info" in capsys.readouterr().err
    assert main(["gateway", "--port", "1", "--log", "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rose gateway: ambiguous option: --log")
    assert err.count("\n") == 1
    monkeypatch.setenv("ROSE_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="ROSE_LOG_LEVEL='loud': give one of debug, info"):
        start_logging("gateway", [])
