"""`coserve.json`: built from the raw records, and built again to verify it."""

import json
from pathlib import Path
from typing import Any

import msgspec

from rose.bench.coserve import verdict as limits
from rose.bench.coserve.plan import ROSE_ARMS
from rose.bench.coserve.records import Event, Records, read_run
from rose.bench.coserve.rows import Analysis, Row, arm_of
from rose.bench.coserve.verdict import Verdict

RESULT = "coserve.json"


def build_result(records: Records) -> dict[str, Any]:
    """Everything the run says, in plain JSON values."""
    rows = Analysis(records).rows()
    run = msgspec.to_builtins(records.run)
    return {
        "run": run,
        "rows": rows,
        "events": [msgspec.to_builtins(event) for event in records.events if _told(event)],
        "danger": danger(rows),
        "verdicts": _counts(rows),
        "verdict": overall(rows),
    }


def danger(rows: list[Row]) -> Verdict:
    """FAILS where naive co-location harms the host: what ROSE is measured against is real then."""
    naive = [row["verdict"] for row in rows if row["mode"] == "naive"]
    return limits.FAILS if limits.FAILS in naive else limits.INCONCLUSIVE


def overall(rows: list[Row]) -> Verdict:
    """Of all rows with a ROSE guest; nothing is shown to hold where nothing was in danger."""
    found = limits.worst(row["verdict"] for row in rows if arm_of(row).guest == "rose")
    if found == limits.HOLDS and danger(rows) != limits.FAILS:
        return limits.INCONCLUSIVE
    return found


def write_result(folder: Path) -> dict[str, Any]:
    """Compute the result of the run in `folder`, and write it there."""
    result = build_result(read_run(folder))
    text = json.dumps(result, indent=1, allow_nan=False)
    (folder / RESULT).write_text(text + "\n", encoding="utf-8")
    return result


def _counts(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Verdicts by arm, over all loads."""
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        arm = counts.setdefault(arm_of(row).name, {})
        arm[row["verdict"]] = arm.get(row["verdict"], 0) + 1
    order = [arm.name for arm in ROSE_ARMS]
    return dict(sorted(counts.items(), key=lambda item: item[0] not in order))


def _told(event: Event) -> bool:
    return event.source == "bench"
