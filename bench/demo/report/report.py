"""Report of a run, computed from its raw records and nothing else.

It is printed as a summary, written for people as `report.md`, and recomputed by `rose demo verify
DIR`, which compares it with the stored one field by field.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.common.stats import FieldDifference, compare
from bench.demo.report import measures, plots
from bench.demo.report.claims import BROKEN_BY_CONTROL, DemoClaim, claims_of
from bench.demo.report.measures import Figures
from bench.demo.report.records import Records, read_records
from bench.load.protocol import join_requests
from rose.errors import BAD_BYTES, RoseError

SCHEMA = 1
MARKS = {"HOLDS": "✔ holds", "FAILS": "✘ FAILS", "INCONCLUSIVE": "? inconclusive"}
STYLES = {"HOLDS": "green", "FAILS": "bold red", "INCONCLUSIVE": "yellow"}
COLUMNS = ("claim", "measured", "95% interval", "must be", "verdict")
# Wide enough for every claim on one line each, also where stdout is a file.
MIN_WIDTH = 120
Report = Figures
"""`report.json`: seconds, bytes and counts; None where the records lack a figure.

`jobs` is empty and `sharing` None where there is one job, which the other fields describe.
"""


def build_report(records: Records) -> Report:
    """Compute the report of the records."""
    settings, run = records.run.settings, records.run
    # The run's own seed, so that a recomputed interval is the same.
    seed = int(settings.get("seed") or 0)
    last_s = max((block.end_s for block in records.blocks), default=run.t0_s)
    return {
        "elapsed_s": (last_s if run.end_s is None else run.end_s) - run.t0_s,
        "settings": settings,
        "reward": measures.reward(records),
        "heldout": measures.held_out(records),
        "trajectories": measures.trajectories(records),
        "tokens": measures.tokens(records),
        "logprob_gap": measures.logprob_gap(records),
        "harvest": measures.harvest(records, seed),
        "host": measures.host_impact(records, seed).arms,
        "weights": measures.weights(records),
        "faults": measures.faults(records),
        "peak_memory_bytes": max((sum(s.bytes.values()) for s in records.memory), default=None),
        "cpu_s": _cpu_s(records),
        "verdicts": claims_of(records, seed),
        "jobs": measures.job_measures(records),
        "sharing": measures.sharing(records),
        "schema": SCHEMA,
    }


def _cpu_s(records: Records) -> dict[str, float]:
    """Return processor seconds by process; a restarted process counts from zero again."""
    used: dict[str, float] = {}
    for block in records.blocks:
        for process, seconds in block.end_stats.cpu_s.items():
            since = seconds - block.start_stats.cpu_s.get(process, 0.0)
            used[process] = used.get(process, 0.0) + (since if since >= 0 else seconds)
    return used


def encode_report(report: Report) -> bytes:
    """Return `report.json`: one field a line; an infinite latency becomes null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def write_report(folder: Path) -> Report:
    """Read the raw records of `folder` and write requests, report and pictures beside them.

    Raises RoseError when a record is missing or malformed.
    """
    records = read_records(folder)
    report = build_report(records)
    joined = join_requests(records.client_requests, records.host_latency)
    (folder / "requests.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(joined))
    (folder / "report.json").write_bytes(encode_report(report))
    plots.draw_all(records, folder)
    (folder / "report.md").write_text(render_report(report), encoding="utf-8")
    return report


def verify(folder: Path) -> list[FieldDifference]:
    """Return the differences between the report in `folder` and its raw records.

    Raises RoseError when a record or the report is missing or malformed.
    """
    report = build_report(read_records(folder))
    recomputed = msgspec.json.decode(encode_report(report))
    try:
        reported = msgspec.json.decode((folder / "report.json").read_bytes())
        page = (folder / "report.md").read_text(encoding="utf-8")
    except OSError as error:
        raise RoseError(f"{folder}: no report to verify ({error.strerror})") from error
    except BAD_BYTES as error:
        raise RoseError(f"{folder / 'report.json'}: {error}") from error
    differences = list(compare(reported, recomputed))
    if page != render_report(report):
        differences.append(FieldDifference("report.md", "its text", "another text"))
    return differences


def print_report(report: Report, out: Path) -> None:
    """Write the claims as a table, after the events of a quickstart in a few lines."""
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    for line in events(report) if report["settings"].get("quickstart") else ():
        console.print(line, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column == "measured" else "left")
    for claim in report["verdicts"]:
        table.add_row(*claim_row(claim), style=STYLES[claim.verdict])
    console.print(table)
    console.print(f"report: {out / 'report.md'}   check it: rose demo verify {out}")
    if report["settings"].get("quickstart"):
        console.print("every claim measured, in about six minutes: rose demo --accept")


def render_report(report: Report) -> str:
    """Return the whole page as Markdown."""
    verdicts: list[str] = [claim.verdict for claim in report["verdicts"]]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict.lower()}" for verdict in MARKS)
    pictures = plots.pictures(bool(report["jobs"]))
    lines = [
        "# ROSE demo: report\n",
        f"{_setting(report)}\n",
        f"## Claims: {counts}\n",
        f"| {' | '.join(COLUMNS)} | why |",
        "| --- | ---: | --- | --- | --- | --- |",
        *(f"| {' | '.join(claim_row(claim))} | {claim.why} |" for claim in report["verdicts"]),
        "\n## Figures\n",
        *(f"- {line}" for line in (*events(report), *_rates(report))),
        "\nAll of this ran on CPU: it proves function and exactness; latency under contention for a"
        " GPU is another measurement.\n",
        *(f"![{caption}]({name})\n" for name, (caption, _) in pictures.items()),
        "Recompute every number above from the raw records: `rose demo verify DIR`.",
    ]
    return "\n".join(lines) + "\n"


def claim_row(claim: DemoClaim) -> tuple[str, str, str, str, str]:
    """Return (claim, measured, 95% interval, limit, verdict) as text."""
    interval = f"{number(claim.ci95[0])} … {number(claim.ci95[1])}" if claim.ci95 else ""
    limit = f"{claim.bound} {number(claim.limit)}"
    return claim.name, number(claim.value), interval, limit, MARKS[claim.verdict]


def _setting(report: Report) -> str:
    """Return a paragraph on the engines and jobs that ran, and under which conditions."""
    # Runs from before there was a choice had vLLM.
    host, guest = (
        {"sglang": "SGLang"}.get(str(report["settings"].get(side)), "vLLM")
        for side in ("host", "guest")
    )
    if report["jobs"]:
        return (
            f"In {report['elapsed_s']:.0f} s {len(report['jobs'])} training runs of equal weight"
            " trained a policy each on FrozenLake. All tokens came from one borrowed guest"
            f" {guest}, which shared a core with a host {host} under bursty load and served one job"
            " at a time. An update of the running engine moved it from one job to the other: a"
            " signed base, and the deltas after it."
        )
    text = (
        f"In {report['elapsed_s']:.0f} s a policy trained for {len(report['reward']['by_step'])}"
        f" steps on FrozenLake. Its tokens came from a dedicated {guest} and from a guest {guest}"
        f" that shared one core with a host {host} under bursty load. After each step the new"
        " weights went to both, as a signed, bit-exact delta."
    )
    if report["settings"].get("accept"):
        text += (
            " Blocks with the guest lent (leased) and frozen alternated in random order under the"
            " same replayed host arrivals; in ceiling blocks the host had no load. At the end the"
            " guest was revoked again and again in the middle of turns, then killed."
        )
    if control := report["settings"].get("control"):
        expected = " or ".join(f"“{name}”" for name in BROKEN_BY_CONTROL[str(control)])
        text += f"\n\n**This run is a control (`{control}`): {expected} must fail.**"
    return text


def events(report: Report) -> Iterator[str]:
    """Return the events of the run, a sentence a line."""
    moved, tokens = report["trajectories"], report["tokens"]
    if report["sharing"]:
        yield from _job_events(report["jobs"], report["sharing"])
    else:
        rewards = [value for value in report["reward"]["by_step"] if value is not None] or [
            math.nan
        ]
        yield (
            f"The trainer published {report['weights']['versions']} versions;"
            f" mean reward went from {rewards[0]:.2f} to {rewards[-1]:.2f}."
        )
    if total := tokens["guest"] + tokens["dedicated"] + tokens["continued"]:
        yield (
            f"{tokens['guest'] / total:.0%} of {total:,} tokens were borrowed:"
            " generated by the guest in time that the host left idle."
        )
    yield _host_line("The host", report["host"]["all"])
    if not report["sharing"]:
        yield (
            f"The guest was revoked {_times(report['faults']['forced_revocations'])} while it"
            f" held turns and killed {_times(report['faults']['guest_kills'])} with kill -9."
        )
    yield (
        f"{moved['started']:,} trajectories were started and {moved['delivered']:,} delivered;"
        f" {moved['revoked_mid_turn']:,} moved in mid-turn."
    )


def _job_events(jobs: Sequence[Figures], found: Figures) -> Iterator[str]:
    for job in jobs:
        share = "–" if job["share"] is None else f"{job['share']:.0%}"
        yield (
            f"{job['job']} had the guest for {job['guest_s']:.0f} s, {share} of its time, and"
            f" published {job['weights']['versions']} versions; reward went from"
            f" {number(job['reward']['first_fifth'])} to {number(job['reward']['last_fifth'])}."
        )
    yield (
        f"The guest went from one job to another {_times(found['changes'])}, with"
        f" {found['engine_starts']} new engines; the first token came"
        f" {number(found['change_s'])} s after the lease, on average."
    )


def _rates(report: Report) -> Iterator[str]:
    if report["harvest"]["pairs"]:
        for name, by_arm in (
            ("Rollout tokens/s", report["harvest"]["tokens_per_s"]),
            ("Training steps/hour", report["harvest"]["steps_per_hour"]),
        ):
            yield (
                f"{name}: {number(by_arm['frozen'])} frozen, {number(by_arm['leased'])} leased,"
                f" {number(by_arm['ceiling'])} with the host idle."
            )
        yield _host_line("Frozen, the host", report["host"]["frozen"])
        yield _host_line("Leased, the host", report["host"]["leased"])
    yield (
        f"Weights: {report['weights']['wire_bytes'] / 1e6:.1f} MB sent instead of"
        f" {report['weights']['full_bytes'] / 1e6:.1f} MB."
    )
    if report["peak_memory_bytes"] is not None:
        yield f"Memory: {report['peak_memory_bytes'] / 2**30:.1f} GiB at most, all processes."
    used = (f"{name} {seconds:.0f}" for name, seconds in sorted(report["cpu_s"].items()))
    yield f"Processor seconds: {', '.join(used)}"


def _host_line(name: str, arm: Figures) -> str:
    return (
        f"{name} served {arm['requests']} requests of its own, {arm['failed']} failed;"
        f" TTFT p50 {milliseconds(arm['ttft_p50_s'])}, p95 {milliseconds(arm['ttft_p95_s'])};"
        f" TPOT p50 {milliseconds(arm['tpot_p50_s'])}, p95 {milliseconds(arm['tpot_p95_s'])}."
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def number(value: float | None) -> str:
    """Return three significant digits, whole thousands, or a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "∞"
    if value == round(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def milliseconds(value_s: float | None) -> str:
    """Return a latency in milliseconds, or a dash for one that is unknown or infinite."""
    return "–" if value_s is None or not math.isfinite(value_s) else f"{value_s * 1e3:.1f} ms"
