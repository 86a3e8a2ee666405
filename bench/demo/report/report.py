"""Report of a run, computed from its raw records and nothing else.

It is printed as a summary, written for people as `report.md`, and recomputed by `rose demo verify
DIR`, which compares it with the stored one field by field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from bench.common.stats import FieldDifference, compare
from bench.demo.report import measures, plots
from bench.demo.report.claims import BROKEN_BY_CONTROL, Claim, claims_of
from bench.demo.report.measures import HarvestMeasures, HostArm, harvest, host_impact
from bench.demo.report.records import Records, read_records
from bench.demo.report.sharing import JobMeasures, Sharing, job_measures, sharing
from bench.load.protocol import join_requests
from rose.errors import BAD_BYTES, RoseError

if TYPE_CHECKING:
    from bench.demo.report.measures import HostArm

MARKS = {"HOLDS": "✔ holds", "FAILS": "✘ FAILS", "INCONCLUSIVE": "? inconclusive"}
CAPTIONS = {
    "reward.png": "Reward of each training step",
    "host.png": "What the host's users felt, and what the guest was doing meanwhile",
    "tokens.png": "Rollout tokens by replica",
    "wire.png": "Bytes sent for each version",
    "jobs.png": "Whose lease the guest had, and the part of its time that each job had by then",
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
    if report.jobs:
        yield _what_jobs_ran(report, total)
        return
    yield (
        f"In {report.elapsed_s:.0f} s a policy trained for {len(reward.by_step)} steps on "
        f"FrozenLake. Its {total:,} tokens came from a dedicated {_engine(report, 'guest')} and "
        f"from a guest {_engine(report, 'guest')} that shared one core with a host "
        f"{_engine(report, 'host')} under bursty load. After each step the new weights went to "
        "both, as a signed, bit-exact delta."
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


def _engine(report: Report, side: str) -> str:
    """Which engine it was, as people write it; runs from before there was a choice had vLLM."""
    return {"sglang": "SGLang"}.get(str(report.settings.get(side)), "vLLM")


def _what_jobs_ran(report: Report, total: int) -> str:
    return (
        f"In {report.elapsed_s:.0f} s {len(report.jobs)} training runs of equal weight trained a "
        f"policy each on FrozenLake, for {' and '.join(str(job.steps) for job in report.jobs)} "
        f"steps. All of their {total:,} tokens came from one borrowed guest "
        f"{_engine(report, 'guest')}, which shared a core with a host {_engine(report, 'host')} "
        "under bursty load and served one job at a time. From one job to the other it came by an "
        "update of the running engine: a signed base, and the deltas after it."
    )


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
    if report.sharing:
        yield from _shared(report.jobs, report.sharing)
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


def _shared(jobs: Sequence[JobMeasures], found: Sharing) -> Iterator[str]:
    for job in jobs:
        first, last = job.reward.first_fifth, job.reward.last_fifth
        yield (
            f"- {job.job}: {job.guest_s:.0f} s of the guest's time ({_percent(job.share)}), "
            f"{job.steps} steps, reward {number(first)} → {number(last)}, "
            f"{job.trajectories.delivered:,} of {job.trajectories.started:,} trajectories "
            "delivered."
        )
    yield (
        f"- The guest went from one job to another {_times(found.changes)}; the first token came "
        f"{number(found.change_s)} s after the lease, on average."
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


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


SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Host:
    """Host latencies over the replayed arrivals that both arms saw; `all`: over every arrival."""

    frozen: HostArm
    leased: HostArm
    all: HostArm


@dataclass(frozen=True, slots=True)
class Report:
    """`report.json`. Seconds, bytes and counts; None where the records cannot tell."""

    elapsed_s: float
    settings: Mapping[str, bool | int | float | str | None]
    reward: measures.Reward
    heldout: measures.HeldOut
    trajectories: measures.Trajectories
    tokens: measures.Tokens
    logprob_gap: measures.LogprobGap
    harvest: HarvestMeasures
    host: Host
    weights: measures.WeightMeasures
    faults: measures.FaultMeasures
    peak_memory_bytes: int | None
    cpu_s: dict[str, float]
    verdicts: list[Claim]
    # Of several jobs; empty and None where there is one, which the fields above are about.
    jobs: list[JobMeasures]
    sharing: Sharing | None
    schema: int = field(default=SCHEMA)


def _elapsed_s(records: Records) -> float:
    """To the end noted in `run.json`, or to the end of the last block."""
    ends_s = [block.end_s for block in records.blocks]
    end_s = records.run.end_s
    return (max(ends_s, default=records.run.t0_s) if end_s is None else end_s) - records.run.t0_s


def _peak_memory_bytes(records: Records) -> int | None:
    return max((sum(sample.bytes.values()) for sample in records.memory), default=None)


def _cpu_s(records: Records) -> dict[str, float]:
    """Processor seconds by process; a restarted process counts from zero again."""
    used: dict[str, float] = {}
    for block in records.blocks:
        before = block.start_stats.cpu_s
        for process, seconds in block.end_stats.cpu_s.items():
            since = seconds - before.get(process, 0.0)
            used[process] = used.get(process, 0.0) + (since if since >= 0 else seconds)
    return used


def bootstrap_seed(records: Records) -> int:
    """The run's own seed, so that a recomputed interval is the same."""
    seed = records.run.settings.get("seed")
    return seed if isinstance(seed, int) else 0


def build_report(records: Records) -> Report:
    """Everything the records say. Pure."""
    seed = bootstrap_seed(records)
    impact = host_impact(records, seed)
    return Report(
        elapsed_s=_elapsed_s(records),
        settings=records.run.settings,
        reward=measures.reward(records),
        heldout=measures.held_out(records),
        trajectories=measures.trajectories(records),
        tokens=measures.tokens(records),
        logprob_gap=measures.logprob_gap(records),
        harvest=harvest(records, seed),
        host=Host(impact.frozen, impact.leased, impact.all),
        weights=measures.weights(records),
        faults=measures.faults(records),
        peak_memory_bytes=_peak_memory_bytes(records),
        cpu_s=_cpu_s(records),
        verdicts=claims_of(records, seed),
        jobs=job_measures(records),
        sharing=sharing(records),
    )


def encode_report(report: Report) -> bytes:
    """`report.json`: one field a line; an infinite latency becomes null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def _write_requests(folder: Path, records: Records) -> None:
    joined = join_requests(records.client_requests, records.host_latency)
    lines = msgspec.json.Encoder().encode_lines(joined)
    (folder / "requests.jsonl").write_bytes(lines)


def write_report(folder: Path) -> Report:
    """Read the raw records of `folder` and write requests, report and pictures beside them.

    Raises `RoseError` when a record is missing or malformed.
    """
    records = read_records(folder)
    report = build_report(records)
    _write_requests(folder, records)
    (folder / "report.json").write_bytes(encode_report(report))
    pictures = plots.draw_all(records, folder)
    text = render_report(report, [picture.name for picture in pictures])
    (folder / "report.md").write_text(text, encoding="utf-8")
    return report


STYLES = {"HOLDS": "green", "FAILS": "bold red", "INCONCLUSIVE": "yellow"}
# Wide enough for every claim on one line each, also where stdout is a file.
MIN_WIDTH = 120


def _console() -> Console:
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    return console


def print_summary(claims: Sequence[Claim], out: Path) -> None:
    """Write the table of claims and where the report is."""
    console = _console()
    table = Table(box=None, pad_edge=False)
    for column in ("claim", "measured", "95% interval", "must be", "verdict"):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for claim in claims:
        table.add_row(*claim_row(claim), style=STYLES[claim.verdict])
    console.print(table)
    console.print(f"report: {out / 'report.md'}   check it: rose demo verify {out}")


def print_quickstart(report: Report, out: Path) -> None:
    """Write what happened in a few lines, and the exact claims below."""
    console = _console()
    for line in told(report):
        console.print(line, highlight=False)
    print_summary(report.verdicts, out)
    console.print("every claim measured, in about six minutes: rose demo --accept")


def told(report: Report) -> Iterator[str]:
    """What happened, a sentence a line."""
    if report.sharing:
        yield from _told_of_jobs(report, report.sharing)
        return
    sampled, moved, storm = report.tokens, report.trajectories, report.faults
    rewards = [value for value in report.reward.by_step if value is not None]
    borrowed, total = sampled.guest, sampled.guest + sampled.dedicated + sampled.continued
    if rewards:
        yield (
            f"The trainer published {report.weights.versions} versions;"
            f" mean reward went from {rewards[0]:.2f} to {rewards[-1]:.2f}."
        )
    if total:
        yield (
            f"{borrowed / total:.0%} of its {total:,} tokens were borrowed:"
            " generated by the guest in time that the host left idle."
        )
    yield _told_of_host(report.host.all)
    yield (
        f"The guest was revoked {_times(storm.forced_revocations)} while it held turns and killed"
        f" {_times(storm.guest_kills)} with kill -9: {moved.revoked_mid_turn}"
        " trajectories went on elsewhere in mid-turn."
    )


def _told_of_jobs(report: Report, found: Sharing) -> Iterator[str]:
    for job in report.jobs:
        yield (
            f"{job.job} had the guest for {job.guest_s:.0f} s, {_percent(job.share)} of its time,"
            f" and published {job.weights.versions} versions."
        )
    moved = report.trajectories.revoked_mid_turn
    yield (
        f"The guest changed jobs {_times(found.changes)}, with {found.engine_starts} new engines;"
        f" {moved} trajectories waited for its return in mid-turn."
    )
    yield _told_of_host(report.host.all)


def _told_of_host(felt: HostArm) -> str:
    return (
        f"The host served {felt.requests} requests of its own, {felt.failed} failed;"
        f" TTFT p50 {milliseconds(felt.ttft_p50_s)}, p95 {milliseconds(felt.ttft_p95_s)}."
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def verify(folder: Path) -> list[FieldDifference]:
    """What differs between the report in `folder` and its raw records; empty when nothing does.

    Raises `RoseError` when a record or the report is missing or malformed.
    """
    records = read_records(folder)
    report = build_report(records)
    recomputed = msgspec.json.decode(encode_report(report))
    try:
        reported = msgspec.json.decode((folder / "report.json").read_bytes())
        page = (folder / "report.md").read_text(encoding="utf-8")
    except OSError as error:
        raise RoseError(f"{folder}: no report to verify ({error.strerror})") from error
    except BAD_BYTES as error:
        raise RoseError(f"{folder / 'report.json'}: {error}") from error
    differences = list(compare(reported, recomputed))
    if page != render_report(report, list(plots.pictures_of(records))):
        differences.append(FieldDifference("report.md", "its text", "another text"))
    return differences
