"""Records that a collector of logs keeps: wall-clock times, one JSON object a line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.clock import utc_text
from rose.logs.eventlog import EventLog, JsonlLog
from rose.scheduler.core.usage import Lent, UsageLog
from rose.security.audit_log import AuditLog

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
