"""Picture of a card's results: a panel for each piece."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from bench.common.report import ALARM, DPI, INK, STYLE
from bench.coserve.plan import ALONE
from bench.coserve.rows import RATIO_LIMIT, arm_of
from bench.gpu.pieces import AGAINST_COPY, GIB_MOVED_S, SHARE_OF_COPY, UPDATE_S
from bench.gpu.runner import Record, read_done

PICTURE = "gpu.png"
BLUE, LIGHT, AMBER = "#2a7f9e", "#7fb8cc", "#e0a83a"
VERDICTS = {"HOLDS": BLUE, "FAILS": ALARM, "INCONCLUSIVE": AMBER}
# Each metric a little above or below its arm's line.
MARKS = {"ttft_p90": ("o", -0.16), "tpot_p90": ("s", 0.16)}
RATIOS = (0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
# Left end of the text, as a share of the panel's width.
TEXT_AT = 1.02
# Room on the right of the longest bar for its figure.
MARGIN = 1.18


def draw(folder: Path) -> Path | None:
    """Draw the results of a folder; return None when there are none."""
    records = {name: record for name in PANELS if (record := read_done(folder, name))}
    if not records:
        return None
    with mpl.rc_context(STYLE | {"axes.titlesize": 10}):
        columns, rows = min(2, len(records)), -(-len(records) // 2)
        figure = Figure(figsize=(5.6 * columns, 2.9 * rows + 0.5))
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, (name, record) in zip(axes, records.items(), strict=False):
            PANELS[name](panel, record["measured"])
        for empty in axes[len(records) :]:
            empty.set_axis_off()
        figure.suptitle(_title(records), fontsize=9, color=INK, x=0.01, ha="left")
        figure.savefig(folder / PICTURE, dpi=DPI)
    return folder / PICTURE


def _title(records: Mapping[str, Record]) -> str:
    environments = [record["environment"] for record in records.values()]
    card = environments[0]["card"]
    commits = ", ".join(dict.fromkeys(environment["commit"] for environment in environments))
    claims = {record["rehearsal"].upper() for record in records.values() if "rehearsal" in record}
    title = f"{card['name']}, driver {card['driver']}, commit {commits}"
    return "\n".join([title, *sorted(claims)])


def _load(axes: Axes, measured: Record) -> None:
    """Draw host p90 latencies over those alone, with 95% intervals, beside the guest's figures."""
    rows = [row for row in measured["rows"] if arm_of(row) is not ALONE]
    for at, row in enumerate(rows):
        for metric, (mark, aside) in MARKS.items():
            value, ends = row["ratio_to_alone"][metric], row["ratio_to_alone_ci95"][metric]
            if value is not None:
                low, high = (end or value for end in ends or (value, value))
                axes.errorbar(
                    [value], [at + aside], xerr=[[value - low], [high - value]], fmt=mark,
                    color=VERDICTS[row["verdict"]], capsize=2, markersize=4,
                )  # fmt: skip
        axes.text(
            TEXT_AT, at, _harvest(row), transform=axes.get_yaxis_transform(), va="center",
            fontsize=8, color=INK,
        )  # fmt: skip
    axes.axvline(1.0, color=INK, linewidth=0.6)
    axes.axvline(RATIO_LIMIT, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [_arm_name(row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(RATIOS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    traffic, busy = measured["traffic"], measured["rows"][0]["busy"]
    source = f"{traffic.get('rate_per_s', 0.0):.2g}/s"
    if "trace" in traffic:
        source = "generated bursts" if traffic["trace"] == "generated" else "Azure trace"
    requests = min(row["host"]["requests"] for row in measured["rows"])
    what = "host p90 ÷ alone: ● TTFT, ■ TPOT (dashed: 1.05; the arm blue holds, red fails)"
    axes.set(title=f"{source}: busy {busy:.2f}, {requests} requests an arm", xlabel=what)


def _harvest(row: Record) -> str:
    """Return the guest's throughput, and its share of idle or spare capacity."""
    if not row["guest_tok_s"]:
        return ""
    which = "spare" if row["slack_share"] else "idle"
    share = row[f"{which}_efficiency"]
    of = f", {share:.2f} of {which}" if share is not None else ""
    return f"{row['guest_tok_s']:,.0f}/s{of}"


def _arm_name(row: Record) -> str:
    arm = arm_of(row)
    if arm.policy is None:
        return arm.name.replace("_", " ")
    return f"{arm.policy}, share {arm.slack_share:g}"


def _copy(axes: Axes, measured: Record) -> None:
    rows = {f"within, {_size(row['bytes'])}": row["gb_s"] for row in measured["within_card"]}
    rows |= {name.replace("_", " "): measured[name]["gb_s"] for name in ("to_host", "from_host")}
    _bars(axes, rows, "{:,.0f}")
    axes.set(title="Copies", xlabel="GB/s (within the card: read and written)")


def _kernels(axes: Axes, measured: Record) -> None:
    speed = measured["speed"]
    rows = {name.replace("_", " "): row["share_of_copy"] for name, row in speed.items()}
    for name, bar in zip(speed, _bars(axes, rows, "{:.2f}", SHARE_OF_COPY), strict=True):
        bar.set_color(AMBER if name in AGAINST_COPY else BLUE)
    what = f"bytes/s ÷ those of the card's copy (yellow: at least {SHARE_OF_COPY:g})"
    axes.set(title="Weight kernels", xlabel=what)


def _update(axes: Axes, measured: Record) -> None:
    rows = {name: measured["overwrite_s"][name] * 1e3 for name in ("least", "p50", "most")}
    _bars(axes, rows, "{:.1f}", UPDATE_S * 1e3, AMBER)
    share = measured["changed"] / measured["weights"]
    title = f"{share:.1%} of {measured['weights'] / 1e9:.1f} billion weights written, read back"
    axes.set(title=title, xlabel=f"ms (at most {UPDATE_S * 1e3:g}, with an engine's pause)")


def _update_serving(axes: Axes, measured: Record) -> None:
    rows = {f"pause of version {u['version']}": u["pause_s"] * 1e3 for u in measured["updates"]}
    _bars(axes, rows, "{:.1f}", UPDATE_S * 1e3, AMBER)
    ratio = measured["host"]["ratio"].get("ttft_p90_s")
    seen = "" if ratio is None else f"; host's TTFT p90 ×{ratio:.2f}"
    limit = f"ms (at most {UPDATE_S * 1e3:g})"
    axes.set(title=f"Versions applied while serving{seen}", xlabel=limit)


def _pages(axes: Axes, measured: Record) -> None:
    """Draw milliseconds for the whole amount, so that the parts can be added up."""
    pages, amount = measured["pages"], _size(measured["pages"] * measured["page_bytes"])
    each, at_once = measured["each_s"], measured["at_once_s"]
    rows = {f"{n}, {s['p50'] * 1e6:.3g} µs a page": s["p50"] * 1e3 * pages for n, s in each.items()}
    rows |= {f"{name}, all at once": spent["p50"] * 1e3 for name, spent in at_once.items()}
    rows["moved through the driver"] = measured["through_driver"]["moved_s"]["p50"] * 1e3
    rows["moved by handle"] = measured["by_handle"]["moved_s"]["p50"] * 1e3
    _bars(axes, rows, "{:,.3g}", GIB_MOVED_S * 1e3, LIGHT)[-1].set_color(AMBER)
    what = f"median ms for {amount} (yellow: at most {GIB_MOVED_S * 1e3:g})"
    axes.set(title=f"{amount} in pages of {_size(measured['page_bytes'])}", xlabel=what)


def _tests(axes: Axes, measured: Record) -> None:
    axes.set_axis_off()
    axes.set_title("Tests on the device")
    axes.text(0, 0.8, f"{measured['passed']} passed, none skipped", fontsize=13, color=BLUE)
    left_out = [f"left out: {name}, {why}" for name, why in measured["left_out"].items()]
    axes.text(0, 0.7, "\n".join(measured["files"] + left_out), color=INK, va="top")


PANELS: dict[str, Callable[[Axes, Record], None]] = {
    "copy": _copy,
    "kernels": _kernels,
    "update": _update,
    "pages": _pages,
    "tests": _tests,
    "update-serving": _update_serving,
    **dict.fromkeys(("serve30", "serve60", "serve90", "bursts"), _load),
}


def _bars(
    axes: Axes,
    rows: Mapping[str, float],
    shown: str,
    limit: float | None = None,
    color: str = BLUE,
) -> list[Any]:
    """Draw a bar for each row, with its figure beside it, and the limit as a dashed line."""
    bars = axes.barh(range(len(rows)), [*rows.values()], color=color, height=0.7)
    axes.set_yticks(range(len(rows)), [*rows])
    axes.invert_yaxis()
    axes.bar_label(bars, [shown.format(value) for value in rows.values()], padding=3, color=INK)
    axes.set_xlim(right=max([*rows.values(), limit or 0.0]) * MARGIN)
    if limit is not None:
        axes.axvline(limit, color=INK, linewidth=1, linestyle="--")
    return list(bars)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 30} GiB" if nbytes >= 1 << 30 else f"{nbytes >> 20} MiB"
