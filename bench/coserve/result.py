"""`coserve.json` and its page of text: computed from the raw records, and again to verify them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.patches
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.checks import FAILS, HOLDS, INCONCLUSIVE, Verdict, number, text_table, worst
from bench.common.report import ALARM, DPI, GRID, INK
from bench.common.stats import FieldDifference, compare, read_json
from bench.coserve.busy_hold import OFF, limit_of
from bench.coserve.plan import ALONE, ROSE_ARMS
from bench.coserve.records import CoserveRecords, read_run
from bench.coserve.rows import (
    MIN_IDLE_EFFICIENCY,
    MIN_SPARE_EFFICIENCY,
    RATIO_LIMIT,
    Analysis,
    Row,
    arm_of,
)

HEAD = (
    *("busy", "traffic", "mode", "share", "n", "ttft p90", "× alone", "tpot p90", "× alone"),
    *("attain", "guest/s", "idle eff", "spare eff", "held", "pressed", "kv MiB", "verdict"),
)
RESULT = "coserve.json"
COLORS = {
    "alone_again": "#9aa3ad",
    "naive": ALARM,
    "paper-0.0": "#2a7f9e",
    "paper-0.7": "#7fb8cc",
    "adaptive-0.0": "#e0a83a",
    "adaptive-0.7": "#f0d49a",
    "weight_apply": "#8d6cab",
    "guest_kill": "#58b19f",
    "guest_start": "#3d5a80",
}
WIDTH = 0.11
Result = dict[str, Any]


Mark = Callable[[Axes, float, Row, str], object]


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the two panels of a picture. mark: draws a row at a place, in its arm's color."""

    title: str
    unit: str
    mark: Mark
    line: float
    log: bool = True


def _ratio_mark(metric: str) -> Mark:
    def point(axes: Axes, x: float, row: Row, color: str) -> None:
        value, ci95 = row["ratio_to_alone"][metric], row["ratio_to_alone_ci95"][metric]
        if value is not None:
            low, high = (end or value for end in ci95 or (value, value))
            ends = [[value - low], [high - value]]
            axes.errorbar([x], [value], yerr=ends, fmt="o", color=color, capsize=2, markersize=4)

    return point


def _share(which: str) -> Mark:
    name = f"{which}_efficiency"
    return lambda axes, x, row, color: axes.bar([x], [row[name] or 0.0], WIDTH * 0.9, color=color)


def _span(metric: str) -> Mark:
    def span(axes: Axes, x: float, row: Row, color: str) -> None:
        values = [row["host"][f"{metric}_p{percent}_s"] for percent in (50, 90, 99)]
        known = [value * 1e3 for value in values if value is not None]
        axes.plot([x] * len(known), known, "_-", color=color, markersize=7)

    return span


def pictures(result: Result) -> dict[str, list[Panel]]:
    """Return the panels of each picture: ratios to alone, guest's harvest, host's latencies."""
    run = result["run"]
    return {
        "ratios.png": [
            Panel(f"Host {m.upper()} p90, × alone", "ratio", _ratio_mark(f"{m}_p90"), RATIO_LIMIT)
            for m in ("tpot", "ttft")
        ],
        "harvest.png": [
            Panel(f"{w.capitalize()} efficiency", "guest ÷ ideal", _share(w), limit, log=False)
            for w, limit in (("idle", MIN_IDLE_EFFICIENCY), ("spare", MIN_SPARE_EFFICIENCY))
        ],
        "latency.png": [
            Panel(
                f"Host {m.upper()}: p50, p90, p99 (dashed: target)", "ms", _span(m),
                run[f"{m}_target_s"] * 1e3,
            )
            for m in ("tpot", "ttft")
        ],
    }  # fmt: skip


def draw_all(result: Result, folder: Path) -> None:
    """Draw and save every picture: a group of marks for each load, one mark for each arm."""
    rows = result["rows"]
    loads = list(dict.fromkeys((row["busy_target"], row["traffic"]) for row in rows))
    for name, panels in pictures(result).items():
        arms = ({ALONE.name: INK} if name == "latency.png" else {}) | COLORS
        places = {arm: (at - (len(arms) - 1) / 2) * WIDTH * 0.85 for at, arm in enumerate(arms)}
        with mpl.rc_context(GRID):
            figure = Figure(figsize=(11, 6.4))
            for axes, panel in zip(figure.subplots(2, 1), panels, strict=True):
                for row in rows:
                    if (arm := arm_of(row).name) in arms:
                        group = loads.index((row["busy_target"], row["traffic"]))
                        panel.mark(axes, group + places[arm], row, arms[arm])
                axes.axhline(panel.line, color=INK, linewidth=1, linestyle="--")
                axes.set_yscale("log" if panel.log else "linear")
                axes.set(title=panel.title, ylabel=panel.unit)
                axes.set_xticks(
                    range(len(loads)), [f"busy {busy:g}\n{traffic}" for busy, traffic in loads]
                )
            handles = [mpl.patches.Patch(color=color, label=arm) for arm, color in arms.items()]
            figure.legend(handles=handles, ncols=5, loc="outside upper right")
            figure.savefig(folder / name, dpi=DPI)


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
        number(row["guest_kv_bytes"] and row["guest_kv_bytes"] / 2**20, 1),
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


def _ratio(value: float | None, ci95: Sequence[float | None] | None) -> str:
    if ci95 is None:
        return number(value, 2)
    return f"{number(value, 2)} [{number(ci95[0], 2)}, {number(ci95[1], 2)}]"


def build_result(records: CoserveRecords) -> dict[str, Any]:
    """Return the whole result in plain JSON values."""
    rows = Analysis(records).rows()
    run = msgspec.to_builtins(records.run)
    return {
        "run": run,
        "rows": rows,
        "events": [
            msgspec.to_builtins(event) for event in records.events if event.source == "bench"
        ],
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


def verify(folder: Path) -> list[FieldDifference]:
    """Return differences from the raw records. Raises RoseError for a malformed file."""
    reported = read_json(folder / RESULT, dict[str, Any], "was the run ended?")
    recomputed = json.loads(json.dumps(build_result(read_run(folder))))
    return list(compare(reported, recomputed))
