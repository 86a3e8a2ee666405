"""One load as a panel: what each arm does to the host, and what its guest gets."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from rose.bench.coserve.plan import ALONE
from rose.bench.coserve.rows import arm_of
from rose.bench.coserve.verdict import RATIO_LIMIT
from rose.bench.gpu.records import Record

INK, HOLDS, FAILS, OPEN = "#22313f", "#2a7f9e", "#c0392b", "#e0a83a"
VERDICTS = {"HOLDS": HOLDS, "FAILS": FAILS, "INCONCLUSIVE": OPEN}
# Each metric a little above or below its arm's line.
MARKS = {"ttft_p90": ("o", -0.16), "tpot_p90": ("s", 0.16)}
RATIOS = (0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
# Where the text begins, as a share of the panel's width.
TEXT_AT = 1.02


def draw_load(axes: Axes, record: Record) -> None:
    """Host p90 latencies over those alone, with 95% intervals; beside them the guest's figures."""
    rows = [row for row in record["measured"]["rows"] if arm_of(row) is not ALONE]
    for at, row in enumerate(rows):
        _latencies(axes, at, row)
        axes.text(
            TEXT_AT, at, _harvest(row), transform=axes.get_yaxis_transform(), va="center",
            fontsize=8, color=INK,
        )  # fmt: skip
    axes.axvline(1.0, color=INK, linewidth=0.6)
    axes.axvline(RATIO_LIMIT, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(RATIOS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    what = "host p90 ÷ alone: ● TTFT, ■ TPOT (dashed: 1.05; the arm blue holds, red fails)"
    axes.set(title=_title(record["measured"]), xlabel=what)


def _latencies(axes: Axes, at: int, row: dict[str, Any]) -> None:
    color = VERDICTS[row["verdict"]]
    for metric, (mark, aside) in MARKS.items():
        value, ends = row["ratio_to_alone"][metric], row["ratio_to_alone_ci95"][metric]
        if value is None:
            continue
        low, high = ends or (value, value)
        spread = [[value - (low or value)], [(high or value) - value]]
        axes.errorbar(
            [value], [at + aside], xerr=spread, fmt=mark, color=color, capsize=2, markersize=4
        )


def _harvest(row: dict[str, Any]) -> str:
    """What the guest gets: of idle time, or with slack lent of what is spare."""
    if not row["guest_tok_s"]:
        return ""
    which = "spare" if row["slack_share"] else "idle"
    share = row[f"{which}_efficiency"]
    of = f", {share:.2f} of {which}" if share is not None else ""
    return f"{row['guest_tok_s']:,.0f}/s{of}"


def _name(row: dict[str, Any]) -> str:
    return (
        arm_of(row).name.replace("_", " ").replace("-", ", share ").replace("share 0.0", "share 0")
    )


def _title(measured: dict[str, Any]) -> str:
    rows = measured["rows"]
    traffic = measured["traffic"]
    requests = min(row["host"]["requests"] for row in rows)
    if "trace" in traffic:
        source = "generated bursts" if traffic["trace"] == "generated" else "Azure trace"
        return f"{source}: busy {rows[0]['busy']:.2f}, {requests} requests an arm"
    return f"busy {rows[0]['busy']:.2f}, {traffic['rate_per_s']:.2g}/s, {requests} requests an arm"
