"""The report of a run, computed from its raw records and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose.demo.report import measures, plots
from rose.demo.report.claims import Claim, claims_of
from rose.demo.report.measures import HarvestMeasures, HostArm, harvest, host_impact
from rose.demo.report.records import Records, read_records
from rose.demo.report.text import render_report
from rose.load.protocol import join_requests

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
