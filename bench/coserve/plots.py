"""Pictures of a result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.patches
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.figures import ALARM, DPI, GRID, INK
from bench.coserve.plan import ALONE
from bench.coserve.rows import arm_of
from bench.coserve.rules import MIN_IDLE_EFFICIENCY, MIN_SPARE_EFFICIENCY, RATIO_LIMIT

Row = dict[str, Any]
Result = dict[str, Any]
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


def draw_ratios(result: Result) -> Figure:
    """Host p90 latencies over those alone, with 95% intervals."""
    figure = Figure(figsize=(11, 6.4))
    for axes, metric in zip(figure.subplots(2, 1), ("tpot_p90", "ttft_p90"), strict=True):

        def point(axes: Axes, x: float, row: Row, color: str, metric: str = metric) -> None:
            value, ci95 = row["ratio_to_alone"][metric], row["ratio_to_alone_ci95"][metric]
            if value is None:
                return
            low, high = ci95 or (value, value)
            ends = [[value - (low or value)], [(high or value) - value]]
            axes.errorbar([x], [value], yerr=ends, fmt="o", color=color, capsize=2, markersize=4)

        _by_load(axes, result, point)
        axes.axhline(RATIO_LIMIT, color=INK, linewidth=1, linestyle="--")
        axes.set_yscale("log")
        axes.set(title=f"Host {metric[:4].upper()} p90, × alone", ylabel="ratio")
    _legend(figure)
    return figure


def draw_harvest(result: Result) -> Figure:
    """Guest tokens/s as shares of idle time and of spare capacity."""
    figure = Figure(figsize=(11, 6.4))
    limits = (
        ("idle_efficiency", MIN_IDLE_EFFICIENCY),
        ("spare_efficiency", MIN_SPARE_EFFICIENCY),
    )
    for axes, (name, limit) in zip(figure.subplots(2, 1), limits, strict=True):

        def bar(axes: Axes, x: float, row: Row, color: str, name: str = name) -> None:
            axes.bar([x], [row[name] or 0.0], width=WIDTH * 0.9, color=color)

        _by_load(axes, result, bar)
        axes.axhline(limit, color=INK, linewidth=1, linestyle="--")
        axes.set(title=name.replace("_", " ").capitalize(), ylabel="guest ÷ ideal")
    _legend(figure)
    return figure


def draw_latency(result: Result) -> Figure:
    """Host latency percentiles of every arm, in milliseconds."""
    figure = Figure(figsize=(11, 6.4))
    for axes, metric in zip(figure.subplots(2, 1), ("tpot", "ttft"), strict=True):

        def span(axes: Axes, x: float, row: Row, color: str, metric: str = metric) -> None:
            values = [row["host"][f"{metric}_p{percent}_s"] for percent in (50, 90, 99)]
            known = [value * 1e3 for value in values if value is not None]
            axes.plot([x] * len(known), known, "_-", color=color, markersize=7)

        _by_load(axes, result, span, alone=True)
        axes.axhline(
            result["run"][f"{metric}_target_s"] * 1e3, color=INK, linewidth=1, linestyle=":"
        )
        axes.set_yscale("log")
        axes.set(title=f"Host {metric.upper()}: p50, p90, p99 (dotted: target)", ylabel="ms")
    _legend(figure, alone=True)
    return figure


def _by_load(
    axes: Axes, result: Result, draw: Callable[[Axes, float, Row, str], None], alone: bool = False
) -> None:
    """One group of marks for each load, one mark for each arm."""
    arms = _arms(alone)
    loads = list(dict.fromkeys((r["busy_target"], r["traffic"]) for r in result["rows"]))
    for row in result["rows"]:
        name = arm_of(row).name
        if name in arms:
            group = loads.index((row["busy_target"], row["traffic"]))
            x = group + (list(arms).index(name) - (len(arms) - 1) / 2) * WIDTH * 0.85
            draw(axes, x, row, arms[name])
    labels = [f"busy {busy:g}\n{traffic}" for busy, traffic in loads]
    axes.set_xticks(range(len(loads)), labels)


def _arms(alone: bool) -> dict[str, str]:
    return ({ALONE.name: INK} if alone else {}) | COLORS


def _legend(figure: Figure, alone: bool = False) -> None:
    handles = [mpl.patches.Patch(color=c, label=name) for name, c in _arms(alone).items()]
    figure.legend(handles=handles, ncols=5, loc="outside upper right")


PICTURES = {
    "ratios.png": draw_ratios,
    "harvest.png": draw_harvest,
    "latency.png": draw_latency,
}


def draw_all(result: Result, folder: Path) -> None:
    """Draw and save every picture."""
    with mpl.rc_context(GRID):
        for name, draw in PICTURES.items():
            draw(result).savefig(folder / name, dpi=DPI)
