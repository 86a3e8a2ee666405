"""`coserve.json` and its page of text: computed from the raw records, and again to verify them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.common.checks import FAILS, HOLDS, INCONCLUSIVE, Verdict, number, text_table, worst
from bench.common.stats import FieldDifference, compare, read_json
from bench.coserve.busy_hold import OFF, limit_of
from bench.coserve.plan import ROSE_ARMS
from bench.coserve.records import CoserveEvent, CoserveRecords, read_run
from bench.coserve.rows import Analysis, Row, arm_of

HEAD = (
    *("busy", "traffic", "mode", "share", "n", "ttft p90", "× alone", "tpot p90", "× alone"),
    *("attain", "guest/s", "idle eff", "spare eff", "held", "pressed", "kv MiB", "verdict"),
)


def render(result: dict[str, Any]) -> str:
    """Lay out one line a row, then the verdicts of the whole run."""
    lines = [text_table("", HEAD, [_cells(row) for row in result["rows"]])]
    for row in result["rows"]:
        failed = [c for c in row["checks"] if c["decisive"] and c["verdict"] == "FAILS"]
        lines += [
            f"{row['mode']} {row['slack_share']} at {row['busy_target']} {row['traffic']}:"
            f" {c['name']} {number(c['value'], 3)} against {number(c['limit'], 3)}"
            for c in failed
        ]
    run = result["run"]
    lines += [
        "",
        f"targets TTFT {run['ttft_target_s']:.3f} s, TPOT {run['tpot_target_s']:.4f} s"
        f" ({run['targets_from']})",
        f"max host busy: {_limit(run['settings'])}",
        f"capacity {run['capacity_rps']:.1f} requests/s; all engines on one CPU core",
        "naive co-location harms the host: "
        + ("yes" if result["danger"] == "FAILS" else "not shown, so nothing is proved"),
        f"verdict of all rows with a ROSE guest: {result['verdict']}",
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    host, ci95, ratio = row["host"], row["ratio_to_alone_ci95"], row["ratio_to_alone"]
    return (
        f"{row['busy']:.2f}",
        row["traffic"],
        row["mode"],
        "" if row["slack_share"] is None else f"{row['slack_share']:.1f}",
        str(host["requests"]),
        number(host["ttft_p90_s"], 4),
        _ratio(ratio["ttft_p90"], ci95["ttft_p90"]),
        number(host["tpot_p90_s"], 4),
        _ratio(ratio["tpot_p90"], ci95["tpot_p90"]),
        f"{host['attainment']:.4f}",
        f"{row['guest_tok_s']:.1f}",
        number(row["idle_efficiency"], 2),
        number(row["spare_efficiency"], 2),
        number(row["held"], 2),
        number(row["host_kv_pressed"], 2),
        number(_mib(row["guest_kv_bytes"]), 1),
        row["verdict"],
    )


def _limit(settings: dict[str, Any]) -> str:
    """Return the limit of the run's capacity policy; runs from before the option had none."""
    limit = limit_of(settings.get("max_host_busy", OFF))
    if limit is None:
        return "no limit, a guest is lent beside any load"
    return (
        f"{limit.share:g} over {limit.over_s:g} s; held from there on, lent again below"
        f" {limit.resume:g}"
    )


def _mib(size: float | None) -> float | None:
    return None if size is None else size / 2**20


def _ratio(value: float | None, ci95: Sequence[float | None] | None) -> str:
    if ci95 is None:
        return number(value, 2)
    return f"{number(value, 2)} [{number(ci95[0], 2)}, {number(ci95[1], 2)}]"


RESULT = "coserve.json"


def build_result(records: CoserveRecords) -> dict[str, Any]:
    """Return the whole result in plain JSON values."""
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
    """Return FAILS where naive co-location harms the host: only then ROSE protects it from harm."""
    naive = [row["verdict"] for row in rows if row["mode"] == "naive"]
    return FAILS if FAILS in naive else INCONCLUSIVE


def overall(rows: list[Row]) -> Verdict:
    """Return the verdict of all rows with a ROSE guest; without danger nothing is shown to hold."""
    found = worst(row["verdict"] for row in rows if arm_of(row).guest == "rose")
    if found == HOLDS and danger(rows) != FAILS:
        return INCONCLUSIVE
    return found


def write_result(folder: Path) -> dict[str, Any]:
    """Compute the result of the run in `folder`, and write it there."""
    result = build_result(read_run(folder))
    text = json.dumps(result, indent=1, allow_nan=False)
    (folder / RESULT).write_text(text + "\n", encoding="utf-8")
    return result


def _counts(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Count verdicts by arm, over all loads."""
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        arm = counts.setdefault(arm_of(row).name, {})
        arm[row["verdict"]] = arm.get(row["verdict"], 0) + 1
    order = [arm.name for arm in ROSE_ARMS]
    return dict(sorted(counts.items(), key=lambda item: item[0] not in order))


def _told(event: CoserveEvent) -> bool:
    return event.source == "bench"


def verify(folder: Path) -> list[FieldDifference]:
    """Return differences from the raw records. Raises RoseError for a malformed file."""
    reported = read_json(folder / RESULT, dict[str, Any], "was the run ended?")
    recomputed = json.loads(json.dumps(build_result(read_run(folder))))
    return list(compare(reported, recomputed))
