"""The pictures of a report, drawn from the raw records."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from bench.common.report import ALARM, DPI, GRID, INK
from bench.demo.report.claims import MIN_GUEST_SHARE
from bench.demo.report.measures import GuestLease, guest_leases, reward
from bench.demo.report.records import FORCED_REVOCATION, GUEST_KILLED, Records
from bench.load.protocol import join_requests

ARM_COLORS = {
    "leased": "#2a7f9e",
    "frozen": "#9aa3ad",
    "ceiling": "#e0a83a",
    "unmeasured": "#c9b8dd",
}
# Colors of each job: points or bars, and line.
REWARD_COLORS = ((ARM_COLORS["leased"], INK), (ARM_COLORS["ceiling"], "#7a5a14"))
BAR_WIDTH = 0.8
FAULT_WIDTHS = {FORCED_REVOCATION: 0.8, GUEST_KILLED: 2.5}
SHADE = 0.16
ROLLING_STEPS = 5
BUCKET_S = 1.0


def rolling_mean(values: Sequence[float | None], width: int) -> list[float]:
    """Mean of the last `width` values that exist, at each position; nan before the first."""
    means = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if value is not None]
        means.append(sum(window) / len(window) if window else float("nan"))
    return means


def _span_s(records: Records) -> tuple[float, float]:
    """First and last moment of the blocks, since the start of the run."""
    t0_s = records.run.t0_s
    return records.blocks[0].start_s - t0_s, records.blocks[-1].end_s - t0_s


def _shade_arms(axes: Axes, records: Records) -> list[Artist]:
    """Background of each block in its arm's color; returns the legend's entries."""
    for block in records.blocks:
        span = (block.start_s - records.run.t0_s, block.end_s - records.run.t0_s)
        axes.axvspan(*span, color=ARM_COLORS[block.arm], alpha=SHADE, linewidth=0)
    used = {block.arm for block in records.blocks}
    return [
        Patch(color=color, alpha=0.5, label=arm) for arm, color in ARM_COLORS.items() if arm in used
    ]


def _apart(records: Records) -> list[tuple[str, Records]]:
    """Each job's records with its name, or all of them without one where there is one job."""
    return [(job, records.of_job(job)) for job in records.jobs] or [("", records)]


def draw_reward(records: Records) -> Figure:
    """Draw sampled reward by step with its rolling mean."""
    figure = Figure(figsize=(8, 3.6))
    axes = figure.subplots()
    for (job, own), (color, line) in zip(_apart(records), REWARD_COLORS, strict=False):
        by_step = reward(own)["by_step"]
        steps = [step.step for step in own.steps]
        points = [float("nan") if value is None else value for value in by_step]
        axes.plot(steps, points, "o", color=color, alpha=0.45, label=f"{job} step".strip())
        axes.plot(
            steps,
            rolling_mean(by_step, ROLLING_STEPS),
            color=line,
            linewidth=2,
            label=f"{job} mean of {ROLLING_STEPS} steps".strip(),
        )
    axes.set(title="Sampled reward", xlabel="training step", ylabel="mean reward", ylim=(0, 1))
    axes.legend(loc="lower right")
    return figure


def _draw_latency(axes: Axes, records: Records, metric: str) -> None:
    """Each request at its arrival, in milliseconds."""
    joined = join_requests(records.client_requests, records.host_latency)
    for arm, color in ARM_COLORS.items():
        served = [r for r in joined if r.arm == arm and getattr(r, metric) is not None]
        times = [r.arrival_s - records.run.t0_s for r in served]
        values_ms = [getattr(r, metric) * 1e3 for r in served]
        axes.scatter(times, values_ms, s=7, color=color, alpha=0.8, linewidths=0)
    axes.set_ylabel(f"{metric[:4].upper()} (ms)")
    if not any(getattr(request, metric) for request in joined):
        # A logarithmic axis without a value cannot be drawn.
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _duty(records: Records) -> tuple[list[float], list[float]]:
    """(time, share of time in which the guest was not held back) between samples."""
    times, shares = [], []
    for before, after in pairwise(records.guest):
        elapsed_s = after.t_s - before.t_s
        # A restarted guest counts from zero again: that interval says nothing.
        if elapsed_s <= 0 or after.yielded_ns < before.yielded_ns:
            continue
        times.append(after.t_s - records.run.t0_s)
        awake = 1 - (after.yielded_ns - before.yielded_ns) / 1e9 / elapsed_s
        shares.append(min(1.0, max(0.0, awake)) if after.step_seq > before.step_seq else 0.0)
    return times, shares


def draw_host(records: Records) -> Figure:
    """Draw TTFT and TPOT of every request by arm, and the guest's duty on the same timeline."""
    figure = Figure(figsize=(10, 6.4))
    ttft, tpot, guest = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 1))
    for axes in (ttft, tpot, guest):
        handles = _shade_arms(axes, records)
    _draw_latency(ttft, records, "ttft_s")
    _draw_latency(tpot, records, "tpot_s")
    times, shares = _duty(records)
    guest.fill_between(times, shares, step="pre", color=ARM_COLORS["leased"], linewidth=0)
    for name, width in FAULT_WIDTHS.items():
        for event in records.events_named(name):
            guest.axvline(event.t_s - records.run.t0_s, color=ALARM, linewidth=width)
        handles.append(Line2D([], [], color=ALARM, linewidth=width, label=name.replace("_", " ")))
    if records.blocks:
        guest.set_xlim(*_span_s(records))
    guest.set(ylim=(0, 1), ylabel="guest duty", xlabel="seconds since start")
    ttft.set_title("Host latency, and the guest's share of the time")
    figure.legend(handles=handles, ncols=6, loc="outside upper right")
    return figure


def draw_tokens(records: Records) -> Figure:
    """Draw rollout tokens per second, stacked by replica."""
    figure = Figure(figsize=(10, 3.6))
    axes = figure.subplots()
    t0_s = records.run.t0_s
    # A segment's tokens are counted when its turn ended: turns are shorter than a bucket.
    ends: dict[str, list[tuple[float, int]]] = {}
    for turn in records.turns:
        for replica, _, start, end in turn.segments:
            ends.setdefault(replica, []).append((turn.end_s - t0_s, end - start))
    last_s = max((t for found in ends.values() for t, _ in found), default=BUCKET_S)
    edges = np.arange(0, last_s + 2 * BUCKET_S, BUCKET_S)
    stacked = {
        replica: np.histogram(
            [t for t, _ in found], bins=edges, weights=[tokens for _, tokens in found]
        )[0]
        / BUCKET_S
        for replica, found in sorted(ends.items())
    }
    handles = _shade_arms(axes, records)
    if stacked:
        palette = ["#3d5a80", "#58b19f", "#e27d60", "#8d6cab"]
        layers = axes.stackplot(
            edges[:-1], *stacked.values(), labels=list(stacked), colors=palette, step="post"
        )
        handles = [*layers, *handles]
    axes.set(title="Rollout tokens", xlabel="seconds since start", ylabel="tokens/s")
    if records.blocks:
        axes.set_xlim(*_span_s(records))
    figure.legend(handles=handles, ncols=6, loc="outside upper right")
    return figure


def draw_wire(records: Records) -> Figure:
    """Draw bytes on the wire against the size of the weights, for each version."""
    figure = Figure(figsize=(8, 3.6))
    axes = figure.subplots()
    density = axes.twinx()
    apart = _apart(records)
    width = BAR_WIDTH / len(apart)
    for at, (job, own) in enumerate(apart):
        shift = (at - (len(apart) - 1) / 2) * width
        versions = [step.version + shift for step in own.steps]
        wire_kb = [step.wire_bytes / 1e3 for step in own.steps]
        full_kb = [step.full_bytes / 1e3 for step in own.steps]
        color = REWARD_COLORS[at][0]
        whole = "all weights" if not at else None
        axes.bar(versions, full_kb, width, color="#dfe3e7", label=whole)
        axes.bar(versions, wire_kb, width, color=color, label=f"{job} sent".strip())
        density.plot(versions, [s.density for s in own.steps], ".-", color=ALARM, linewidth=1)
    density.set(ylim=(0, 1), ylabel="changed weights")
    density.yaxis.label.set_color(ALARM)
    density.spines["right"].set_visible(True)
    density.grid(visible=False)
    axes.set(title="Each version on the wire", xlabel="version", ylabel="kB")
    figure.legend(ncols=2, loc="outside upper right")
    return figure


def draw_jobs(records: Records) -> Figure:
    """Draw the job that had the guest, and below it each job's share so far."""
    figure = Figure(figsize=(10, 3.6))
    lent, part = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    t0_s = records.run.t0_s
    leases = guest_leases(records)
    edges_s = sorted({at_s for lease in leases for at_s in (lease.start_s, lease.end_s)})
    for job, (color, _) in zip(records.jobs, REWARD_COLORS, strict=False):
        own = [lease for lease in leases if lease.job == job]
        spans = [(lease.start_s - t0_s, lease.end_s - lease.start_s) for lease in own]
        lent.broken_barh(spans, (0, 1), facecolors=color, label=job)
        had_s = [_had_s(own, at_s) for at_s in edges_s]
        all_s = [_had_s(leases, at_s) for at_s in edges_s]
        parts = [mine / (all_ or math.nan) for mine, all_ in zip(had_s, all_s, strict=True)]
        part.plot([at_s - t0_s for at_s in edges_s], parts, color=color, linewidth=2)
    for limit in (MIN_GUEST_SHARE, 1 - MIN_GUEST_SHARE):
        part.axhline(limit, color=ALARM, linewidth=0.8, linestyle="--")
    lent.set(yticks=(), title="The guest's time")
    part.set(ylim=(0, 1), ylabel="part so far", xlabel="seconds since start")
    if records.blocks:
        part.set_xlim(*_span_s(records))
    figure.legend(ncols=4, loc="outside upper right")
    return figure


def _had_s(leases: Sequence[GuestLease], until_s: float) -> float:
    return sum(max(0.0, min(lease.end_s, until_s) - lease.start_s) for lease in leases)


Picture = tuple[str, Callable[[Records], Figure]]
PICTURES: dict[str, Picture] = {
    "reward.png": ("Reward of each training step", draw_reward),
    "host.png": ("Latency of the host's requests, and the guest's duty meanwhile", draw_host),
    "tokens.png": ("Rollout tokens by replica", draw_tokens),
    "wire.png": ("Bytes sent for each version", draw_wire),
}
SHARED_PICTURES: dict[str, Picture] = {
    "jobs.png": ("The job that had the guest, and each job's share so far", draw_jobs)
}


def pictures(shared: bool) -> dict[str, Picture]:
    """Return caption and drawing function of each picture; one more where jobs share a guest."""
    return PICTURES | (SHARED_PICTURES if shared else {})


def draw_all(records: Records, folder: Path) -> None:
    """Draw and save every picture."""
    with mpl.rc_context(GRID):
        for name, (_, draw) in pictures(bool(records.jobs)).items():
            draw(records).savefig(folder / name, dpi=DPI)
