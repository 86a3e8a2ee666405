"""The report for people: `report.md`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rose.demo.report.claims import BROKEN_BY_CONTROL, Claim

if TYPE_CHECKING:
    from rose.demo.report.measures import HostArm
    from rose.demo.report.report import Report

MARKS = {"HOLDS": "✔ holds", "FAILS": "✘ FAILS", "INCONCLUSIVE": "? inconclusive"}
CAPTIONS = {
    "reward.png": "Reward of each training step",
    "host.png": "What the host's users felt, and what the guest was doing meanwhile",
    "tokens.png": "Rollout tokens by replica",
    "wire.png": "Bytes sent for each version",
}


def number(value: float | None) -> str:
    """A value for people: three digits that matter, thousands whole, or a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "∞"
    if value == round(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def milliseconds(value_s: float | None) -> str:
    """A latency for people."""
    return "–" if value_s is None or not math.isfinite(value_s) else f"{value_s * 1e3:.1f} ms"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.1f} MB"


def claim_row(claim: Claim) -> tuple[str, str, str, str, str]:
    """(claim, measured, 95% interval, limit, verdict) as text."""
    low_high = claim.ci95
    interval = f"{number(low_high[0])} … {number(low_high[1])}" if low_high else ""
    limit = f"{claim.bound} {number(claim.limit)}"
    return claim.name, number(claim.value), interval, limit, MARKS[claim.verdict]


def _table(report: Report) -> Iterator[str]:
    yield "| claim | measured | 95% interval | must be | verdict | why |"
    yield "| --- | ---: | --- | --- | --- | --- |"
    for claim in report.verdicts:
        yield f"| {' | '.join(claim_row(claim))} | {claim.why} |"


def _what_ran(report: Report) -> Iterator[str]:
    reward, tokens = report.reward, report.tokens
    control = report.settings.get("control")
    total = tokens.guest + tokens.dedicated + tokens.continued
    yield (
        f"In {report.elapsed_s:.0f} s a policy trained for {len(reward.by_step)} steps on "
        f"FrozenLake. Its {total:,} tokens came from a dedicated vLLM and from a guest vLLM that "
        "shared one core with a host vLLM under bursty load. After each step the new weights went "
        "to both, as a signed, bit-exact delta."
    )
    if report.settings.get("quickstart"):
        yield "The guest was revoked in the middle of turns, then killed."
    elif report.settings.get("accept"):
        yield (
            "Blocks with the guest lent (leased) and frozen alternated in random order under the "
            "same replayed host arrivals; in ceiling blocks the host had no load. At the end the "
            "guest was revoked again and again in the middle of turns, then killed."
        )
    if isinstance(control, str):
        expected = " or ".join(f"“{name}”" for name in BROKEN_BY_CONTROL[control])
        yield ""
        yield f"**This run is a control (`{control}`): {expected} must fail.**"


def _host_line(name: str, arm: HostArm) -> str:
    return (
        f"- Host, {name}: TTFT p50 {milliseconds(arm.ttft_p50_s)}, "
        f"p95 {milliseconds(arm.ttft_p95_s)}; TPOT p50 {milliseconds(arm.tpot_p50_s)}, "
        f"p95 {milliseconds(arm.tpot_p95_s)}; {arm.requests} requests, {arm.failed} failed."
    )


def _figures(report: Report) -> Iterator[str]:
    sent, moved = report.weights, report.trajectories
    if report.harvest.pairs:
        yield from _arms(report)
    yield (
        f"- Trajectories: {moved.started:,} started, {moved.delivered:,} delivered, "
        f"{moved.revoked_mid_turn:,} moved in the middle of a turn."
    )
    yield (
        f"- Weights: {sent.versions} versions, {_megabytes(sent.wire_bytes)} sent instead of "
        f"{_megabytes(sent.full_bytes)}."
    )
    if report.peak_memory_bytes is not None:
        yield f"- Memory: {report.peak_memory_bytes / 2**30:.1f} GiB at most, all processes."
    yield "- Processor seconds: " + ", ".join(
        f"{name} {seconds:.0f}" for name, seconds in sorted(report.cpu_s.items())
    )


def _arms(report: Report) -> Iterator[str]:
    harvest, host = report.harvest, report.host
    tokens_per_s, steps_per_hour = harvest.tokens_per_s, harvest.steps_per_hour
    yield (
        f"- Rollout tokens/s: {number(tokens_per_s.frozen)} frozen, "
        f"{number(tokens_per_s.leased)} leased, {number(tokens_per_s.ceiling)} with the host idle."
    )
    yield (
        f"- Training steps/hour: {number(steps_per_hour.frozen)} frozen, "
        f"{number(steps_per_hour.leased)} leased, "
        f"{number(steps_per_hour.ceiling)} with the host idle."
    )
    yield _host_line("frozen", host.frozen)
    yield _host_line("leased", host.leased)


def summary(report: Report) -> str:
    """One line: how many claims hold."""
    counts = {
        verdict: sum(claim.verdict == verdict for claim in report.verdicts) for verdict in MARKS
    }
    return ", ".join(f"{counts[verdict]} {verdict.lower()}" for verdict in MARKS)


def render_report(report: Report, pictures: Sequence[str]) -> str:
    """The whole page as Markdown."""
    lines = [
        "# ROSE demo: report",
        "",
        *_what_ran(report),
        "",
        f"## Claims: {summary(report)}",
        "",
        *_table(report),
        "",
        "## Figures",
        "",
        *_figures(report),
        "",
        "All of this ran on CPU: it proves function and exactness; latency under contention "
        "for a GPU is another measurement.",
        "",
        *(f"![{CAPTIONS[name]}]({name})\n" for name in pictures),
        "Recompute every number above from the raw records: `rose demo verify DIR`.",
    ]
    return "\n".join(lines) + "\n"
