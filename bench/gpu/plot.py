"""Picture of a card's results: a panel for each piece."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from bench.common.figures import ALARM, DPI, INK, STYLE
from bench.coserve.plan import ALONE
from bench.coserve.rows import arm_of
from bench.coserve.rules import RATIO_LIMIT
from bench.gpu.limits import AGAINST_COPY, GIB_MOVED_S, SHARE_OF_COPY, UPDATE_S
from bench.gpu.runner import Record, read_done

VERDICTS = {"HOLDS": "#2a7f9e", "FAILS": ALARM, "INCONCLUSIVE": "#e0a83a"}
# Each metric a little above or below its arm's line.
MARKS = {"ttft_p90": ("o", -0.16), "tpot_p90": ("s", 0.16)}
RATIOS = (0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
# Left end of the text, as a share of the panel's width.
TEXT_AT = 1.02


def draw_load(axes: Axes, record: Record) -> None:
    """Draw host p90 latencies over those alone, with 95% intervals, beside the guest's figures."""
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
    axes.set(title=_load_title(record["measured"]), xlabel=what)


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
    """Return the guest's throughput, and its share of idle or spare capacity."""
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


def _load_title(measured: dict[str, Any]) -> str:
    rows = measured["rows"]
    traffic = measured["traffic"]
    requests = min(row["host"]["requests"] for row in rows)
    if "trace" in traffic:
        source = "generated bursts" if traffic["trace"] == "generated" else "Azure trace"
        return f"{source}: busy {rows[0]['busy']:.2f}, {requests} requests an arm"
    return f"busy {rows[0]['busy']:.2f}, {traffic['rate_per_s']:.2g}/s, {requests} requests an arm"


PICTURE = "gpu.png"
BLUE, LIGHT, AMBER = "#2a7f9e", "#7fb8cc", "#e0a83a"
# Room on the right of the longest bar for its figure.
_MARGIN = 1.18


def draw(folder: Path) -> Path | None:
    """Draw the results of a folder; return None when there are none."""
    found = {name: read_done(folder, name) for name in PANELS}
    records = {name: record for name, record in found.items() if record is not None}
    if not records:
        return None
    path = folder / PICTURE
    figure_of(records).savefig(path, dpi=DPI)
    return path


def figure_of(records: dict[str, Record]) -> Figure:
    """Return a figure with a panel for each record."""
    with mpl.rc_context(STYLE | {"axes.titlesize": 10}):
        return _panels(records)


def _panels(records: dict[str, Record]) -> Figure:
    rows = -(-len(records) // 2)
    columns = min(2, len(records))
    figure = Figure(figsize=(5.6 * columns, 2.9 * rows + 0.5))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, (name, record) in zip(axes, records.items(), strict=False):
        PANELS[name](panel, record)
    for empty in axes[len(records) :]:
        empty.set_axis_off()
    figure.suptitle(_title(records), fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def _title(records: dict[str, Record]) -> str:
    environments = [record["environment"] for record in records.values()]
    card = environments[0]["card"]
    commits = ", ".join(dict.fromkeys(environment["commit"] for environment in environments))
    title = f"{card['name']}, driver {card['driver']}, commit {commits}"
    claims = {record["rehearsal"] for record in records.values() if "rehearsal" in record}
    return "\n".join([title, *(claim.upper() for claim in sorted(claims))])


def _copy(axes: Axes, record: Record) -> None:
    measured = record["measured"]
    rows = [(f"within, {_size(row['bytes'])}", row["gb_s"]) for row in measured["within_card"]]
    rows += [(name.replace("_", " "), measured[name]["gb_s"]) for name in ("to_host", "from_host")]
    _bars(axes, rows, "{:,.0f}")
    axes.set(title="Copies", xlabel="GB/s (within the card: read and written)")


def _kernels(axes: Axes, record: Record) -> None:
    speed = record["measured"]["speed"]
    rows = [(name.replace("_", " "), row["share_of_copy"]) for name, row in speed.items()]
    bars = _bars(axes, rows, "{:.2f}")
    for name, bar in zip(speed, bars, strict=True):
        bar.set_color(AMBER if name in AGAINST_COPY else BLUE)
    _limit(axes, SHARE_OF_COPY)
    what = f"bytes/s ÷ those of the card's copy (yellow: at least {SHARE_OF_COPY:g})"
    axes.set(title="Weight kernels", xlabel=what)


def _update(axes: Axes, record: Record) -> None:
    measured = record["measured"]
    spent = measured["overwrite_s"]
    rows = [(name, spent[name] * 1e3) for name in ("least", "p50", "most")]
    _bars(axes, rows, "{:.1f}", AMBER)
    _limit(axes, UPDATE_S * 1e3)
    share = measured["changed"] / measured["weights"]
    title = f"{share:.1%} of {measured['weights'] / 1e9:.1f} billion weights written, read back"
    axes.set(title=title, xlabel=f"ms (at most {UPDATE_S * 1e3:g}, with an engine's pause)")


def _update_serving(axes: Axes, record: Record) -> None:
    measured = record["measured"]
    rows = [(f"pause of version {u['version']}", u["pause_s"] * 1e3) for u in measured["updates"]]
    _bars(axes, rows, "{:.1f}", AMBER)
    _limit(axes, UPDATE_S * 1e3)
    ratio = measured["host"]["ratio"].get("ttft_p90_s")
    seen = "" if ratio is None else f"; host's TTFT p90 ×{ratio:.2f}"
    axes.set(
        title=f"Versions applied while serving{seen}", xlabel=f"ms (at most {UPDATE_S * 1e3:g})"
    )


def _pages(axes: Axes, record: Record) -> None:
    """Draw milliseconds for the whole amount, so that the parts can be added up."""
    measured = record["measured"]
    pages, amount = measured["pages"], _size(measured["pages"] * measured["page_bytes"])
    rows = [
        (f"{name}, {spent['p50'] * 1e6:.3g} µs a page", spent["p50"] * 1e3 * pages)
        for name, spent in measured["each_s"].items()
    ]
    rows += [
        (f"{name}, all at once", spent["p50"] * 1e3)
        for name, spent in measured["at_once_s"].items()
    ]
    ways = {"through_driver": "moved through the driver", "by_handle": "moved by handle"}
    rows += [(label, measured[way]["moved_s"]["p50"] * 1e3) for way, label in ways.items()]
    bars = _bars(axes, rows, "{:,.3g}", LIGHT)
    bars[-1].set_color(AMBER)
    _limit(axes, GIB_MOVED_S * 1e3)
    what = f"median ms for {amount} (yellow: at most {GIB_MOVED_S * 1e3:g})"
    axes.set(title=f"{amount} in pages of {_size(measured['page_bytes'])}", xlabel=what)


def _tests(axes: Axes, record: Record) -> None:
    passed = record["measured"]["passed"]
    axes.set_axis_off()
    axes.set_title("Tests on the device")
    axes.text(0, 0.8, f"{passed} passed, none skipped", fontsize=13, color=BLUE)
    left_out = [f"left out: {name}, {why}" for name, why in record["measured"]["left_out"].items()]
    axes.text(0, 0.7, "\n".join(record["measured"]["files"] + left_out), color=INK, va="top")


PANELS: dict[str, Callable[[Axes, Record], None]] = {
    "copy": _copy,
    "kernels": _kernels,
    "update": _update,
    "pages": _pages,
    "tests": _tests,
    "update-serving": _update_serving,
    **dict.fromkeys(("serve30", "serve60", "serve90", "bursts"), draw_load),
}


def _bars(axes: Axes, rows: list[tuple[str, float]], shown: str, color: str = BLUE) -> list[Any]:
    names, values = zip(*rows, strict=True)
    bars = axes.barh(range(len(rows)), values, color=color, height=0.7)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.bar_label(bars, [shown.format(value) for value in values], padding=3, color=INK)
    axes.set_xlim(right=max(values) * _MARGIN)
    return list(bars)


def _limit(axes: Axes, value: float) -> None:
    axes.axvline(value, color=INK, linewidth=1, linestyle="--")
    axes.set_xlim(right=max(axes.get_xlim()[1], value * _MARGIN))


def _size(nbytes: int) -> str:
    return f"{nbytes >> 30} GiB" if nbytes >= 1 << 30 else f"{nbytes >> 20} MiB"
