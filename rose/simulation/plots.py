"""Pictures of results: steps by their parts, use of cards, users' attainment, tail of episodes.

Each takes results of one scenario under several policies; a policy has the same colour in all of
them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from rose.errors import ConfigError
from rose.simulation.fluid.fleet import FleetResult
from rose.simulation.fluid.what_if import WhatIfAnswer
from rose.simulation.results import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
INK = "#22313f"
ROLLOUT, TRAIN, SYNC = "#2a7f9e", "#e0a83a", "#c0392b"
HOST, GUEST = "#9aa3ad", "#2a7f9e"
POOLS = {"host": HOST, "guest": GUEST, "dedicated": "#58b19f", "training": "#e0a83a"}
POLICIES = ("#22313f", "#c0392b", "#8d6cab", "#e0a83a", "#2a7f9e", "#58b19f", "#3d5a80", "#7fb8cc")
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.color": "#e6e9ec",
    "font.size": 9,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
# A slice with fewer requests says little about a share: it is joined with its neighbours.
_LEAST_REQUESTS = 20
MOST_BARS = 96


def draw_steps(results: Sequence[RunResult]) -> "Figure":
    """Return a figure of the mean time of a training step under each policy, as rollout, training
    and weights.
    """
    figure, axes = _figure(1 + 0.8 * len(results))
    rows = range(len(results))
    left = [0.0] * len(results)
    for key, colour, label in (
        ("rollout_s", ROLLOUT, "rollout"),
        ("train_s", TRAIN, "train"),
        ("sync_s", SYNC, "weights"),
    ):
        # The first step starts engines: it is left out where there are more.
        counted = [each.steps[1:] or each.steps for each in results]
        values = [_mean([getattr(step, key) for step in steps]) for steps in counted]
        axes.barh(rows, values, left=left, color=colour, label=label, height=0.6)
        left = [before + value for before, value in zip(left, values, strict=True)]
    for row, total in zip(rows, left, strict=True):
        axes.text(total, row, f" {total:.0f} s", va="center", color=INK)
    _name_rows(axes, [each.policy for each in results])
    axes.set_xlim(right=1.12 * max(left, default=1.0) or 1.0)
    name = results[0].scenario if results else ""
    axes.set(title=f"Time of a step: {name}", xlabel="seconds")
    _legend(axes, 3)
    return figure


def draw_use(results: Sequence[RunResult]) -> "Figure":
    """Return a figure of the share of each pool's cards that was in a step, over time, with a row
    for each policy.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.7 + 1.6 * len(results)))
    rows = figure.subplots(len(results), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, each in zip(rows, results, strict=True):
        minutes = [part.start_s / 60 for part in each.use]
        for key, colour in POOLS.items():
            shares = [getattr(part, key) for part in each.use]
            axes.step(minutes, shares, where="post", color=colour, label=key)
        axes.set_title(f"{each.policy}: cards in use {each.gpu_use:.0%}")
        axes.set_ylim(0, 1.02)
    rows[-1].set_xlabel("minutes")
    figure.supylabel("share of time in a step")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="outside upper right")
    return figure


def draw_slo(results: Sequence[RunResult]) -> "Figure":
    """Return a figure of the share of users' requests that met their targets, over time, with a
    line for each policy.
    """
    figure, axes = _figure(3.2)
    lowest = 1.0
    for each, colour in zip(results, cycle(POLICIES), strict=False):
        if each.users is None:
            continue
        points = _attained([(s.start_s, s.requests, s.attained) for s in each.users.series])
        if points:
            lowest = min(lowest, *(share for _, share in points))
            minutes = [start_s / 60 for start_s, _ in points]
            axes.step(
                minutes, [share for _, share in points], where="post", color=colour,
                label=f"{each.policy} ({each.users.attainment:.2%})",
            )  # fmt: skip
    axes.set_ylim(max(0.0, lowest - 0.05), 1.005)
    axes.set(title="Users' requests within their targets", xlabel="minutes", ylabel="share")
    if axes.lines:
        axes.legend(loc="lower right", ncols=2)
    return figure


def draw_tail(results: Sequence[RunResult]) -> "Figure":
    """Return a figure of trajectories' times under each policy: median, 90th and 99th percentile,
    and the longest.
    """
    figure, axes = _figure(3.4)
    labels = ("p50", "p90", "p99", "longest")
    for each, colour in zip(results, cycle(POLICIES), strict=False):
        found = each.trajectory_s
        if found.count:
            axes.plot(
                labels, (found.p50, found.p90, found.p99, found.max), "o-", color=colour,
                label=each.policy,
            )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set(title="Tail of trajectories", ylabel="seconds from start to reward")
    if axes.lines:
        axes.legend(loc="upper left", ncols=2)
    return figure


def draw_what_if(answer: WhatIfAnswer) -> "Figure":
    """Return a figure of an operator's trace: the cards' time that users need, what is lent of the
    rest, and users' TTFT.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6))
    top, bottom = figure.subplots(2, 1, height_ratios=(2, 1))
    unit, unit_s = ("hours", 3_600.0) if answer.hours > 4 else ("minutes", 60.0)
    edges, users, lent = _joined(answer)
    edges = [edge_s / unit_s for edge_s in edges]
    both = [each + beside for each, beside in zip(users, lent, strict=True)]
    top.stairs(users, edges, color=HOST, label="users", fill=True)
    top.stairs(both, edges, baseline=users, color=GUEST, label="lent to rollouts", fill=True)
    top.set_ylim(0, 1.02)
    top.set_xlim(0, edges[-1])
    top.set(title="Share of the serving cards' time", xlabel=f"{unit} of the trace", ylabel="share")
    _legend(top, 2)
    _bars(bottom, answer)
    return figure


def _joined(answer: WhatIfAnswer) -> tuple[list[float], list[float], list[float]]:
    """Return (edges_s, users, lent) of slices joined into at most MOST_BARS bars."""
    many = -(-len(answer.use) // MOST_BARS)
    edges, users, lent = list[float](), list[float](), list[float]()
    for first in range(0, len(answer.use), many):
        part = answer.use[first : first + many]
        edges.append(part[0].start_s)
        users.append(_mean([each.host for each in part]))
        lent.append(_mean([each.guest for each in part]))
    return [*edges, answer.hours * 3_600.0], users, lent


def draw_fleet(result: FleetResult) -> "Figure":
    """Return a figure of a fleet's serving cards by the hour: users' share, what is lendable, and
    what is borrowed.
    """
    figure, axes = _figure(3.4)
    hours = [each.start_s / 3_600 for each in result.series]
    for key, colour, label in (
        ("users", HOST, "users alone"),
        ("lendable", "#7fb8cc", "lendable"),
        ("borrowed", GUEST, "borrowed"),
    ):
        values = [getattr(each, key) for each in result.series]
        axes.step(hours, values, where="post", color=colour, label=label)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, result.hours)
    axes.set_xticks(range(0, int(result.hours) + 1, 24 if result.hours > 48 else 4))
    axes.set(title="Serving cards of the fleet", xlabel="hours from Monday 00:00", ylabel="share")
    _legend(axes, 3)
    return figure


def _bars(axes: "Axes", answer: WhatIfAnswer) -> None:
    rows = ("alone", "lending")
    for shift, (key, label, colour) in zip(
        (-0.2, 0.2), (("p50", "p50", "#7fb8cc"), ("p99", "p99", INK)), strict=True
    ):
        values = [getattr(each.ttft_s, key) for each in (answer.alone, answer.lending)]
        places = [row + shift for row in range(len(rows))]
        axes.barh(places, values, height=0.36, color=colour, label=label)
        for place, value in zip(places, values, strict=True):
            axes.text(value, place, f" {value:.3g} s", va="center", color=INK)
    _name_rows(axes, rows)
    axes.margins(x=0.12)
    axes.set(title="Users' time to the first token", xlabel="seconds")
    _legend(axes, 2)


PICTURES: dict[str, Callable[[Sequence[RunResult]], "Figure"]] = {
    "steps.png": draw_steps,
    "use.png": draw_use,
    "slo.png": draw_slo,
    "tail.png": draw_tail,
}


def save_plots(results: Sequence[RunResult], folder: Path) -> list[Path]:
    """Save four pictures of at least one result in a folder; return their paths.

    Raises ConfigError if matplotlib is not installed.
    """
    return _save({name: partial(draw, results) for name, draw in PICTURES.items()}, folder)


def save_what_if(answer: WhatIfAnswer, folder: Path) -> list[Path]:
    """Save the picture of an answer as what-if.png in a folder; return its path in a list.

    Raises ConfigError as `save_plots` does.
    """
    return _save({"what-if.png": partial(draw_what_if, answer)}, folder)


def save_fleet(result: FleetResult, folder: Path) -> list[Path]:
    """Save the picture of a fleet as fleet.png in a folder; return its path in a list.

    Raises ConfigError as `save_plots` does.
    """
    return _save({"fleet.png": partial(draw_fleet, result)}, folder)


def _save(pictures: dict[str, Callable[[], "Figure"]], folder: Path) -> list[Path]:
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "plots need matplotlib; install rose-rollout[simulation], or leave --plots out"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, draw in pictures.items():
            draw().savefig(folder / name, dpi=DPI)
    return [folder / name for name in pictures]


def _figure(height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height))
    return figure, figure.subplots()


def _legend(axes: "Axes", columns: int) -> None:
    axes.legend(ncols=columns, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _name_rows(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _attained(slices: Sequence[tuple[float, int, int]]) -> list[tuple[float, float]]:
    """Return (start_s, share attained) of slices (start_s, requests, attained), joined until each
    has enough requests.
    """
    found: list[tuple[float, float]] = []
    start_s, requests, attained = 0.0, 0, 0
    for slice_s, count, good in slices:
        start_s = slice_s if not requests else start_s
        requests, attained = requests + count, attained + good
        if requests >= _LEAST_REQUESTS:
            found.append((start_s, attained / requests))
            requests = attained = 0
    return found
