"""A measured run of one host and its guest, as the simulator's validation takes it.

It is taken from the raw records of a co-serving run: for each load the arrivals, and what repeats
of it measured, alone and beside a guest; and the step times of both engines, fitted as
`rose profile` fits them, of the first load and of the guest alone. Other loads are not looked at.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from bench.common.stats import read_json
from bench.coserve.plan import ALONE, ALONE_AGAIN, IDLE_ROSE
from bench.coserve.records import CoserveBlockRecord, CoserveRecords, read_run
from bench.load.protocol import Request
from executor.step_log import HEADER, STEP, StepRecord, read_step_log, used_bytes
from rose.errors import RoseError
from slo import StepProfile, StepSample, fit_profile, percentile

KIND, LAYOUT = "rose.measured_hosts", 1
LENDING = "adaptive-0.0"
# A size of step that was seen less often is as likely to be an interruption.
_LEAST_SEEN = 3
_AT_ONCE_NS = 2_000_000


class EngineSizes(msgspec.Struct, frozen=True):
    """Limits of one engine, and its fitted step times."""

    kv_tokens: int
    kv_bytes_per_token: int
    max_sequences: int
    steps: StepProfile


class MeasuredRepeat(msgspec.Struct, frozen=True):
    """One block of one load: what users saw, and tokens a second of host and guest."""

    requests: int
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    host_tok_s: float
    guest_tok_s: float


class MeasuredLoad(msgspec.Struct, frozen=True):
    """One load: arrivals as (seconds, prompt tokens, output tokens), and its repeats."""

    name: str
    seconds: float
    arrivals: tuple[tuple[float, int, int], ...]
    alone: tuple[MeasuredRepeat, ...]
    lending: tuple[MeasuredRepeat, ...]


class MeasuredRun(msgspec.Struct, frozen=True):
    """All loads of a run. guest_streams: turns at a time, of so many tokens each."""

    seed: int
    machine: str
    ttft_target_s: float
    tpot_target_s: float
    host: EngineSizes
    guest: EngineSizes
    guest_streams: int
    guest_prompt_tokens: int
    guest_output_tokens: int
    guest_alone_tok_s: float
    loads: tuple[MeasuredLoad, ...]


class MeasuredFile(msgspec.Struct, frozen=True):
    """Runs of one machine, each with its own calibration."""

    kind: str
    layout: int
    runs: tuple[MeasuredRun, ...]


def read_measured(path: Path) -> tuple[MeasuredRun, ...]:
    """Return the runs in a file. Raises RoseError for any other file."""
    found = read_json(path, MeasuredFile, "name a file of `python -m bench.simulation`")
    if (found.kind, found.layout) != (KIND, LAYOUT):
        raise RoseError(f"{path}:1: kind, layout: {found.kind} {found.layout}; no measured runs")
    return found.runs


def write_measured(runs: Sequence[MeasuredRun], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(MeasuredFile(KIND, LAYOUT, tuple(runs))) + b"\n")


def extract(folder: Path) -> MeasuredRun:
    """Return the run with raw records in a folder. RoseError for one without repeats."""
    records = read_run(folder)
    groups = _groups(records.blocks)
    if not groups:
        raise RoseError(f"{folder}: no load was played alone more than once")
    loads = tuple(_load(records, blocks) for blocks in groups)
    run = records.run
    settings = run.settings
    first_alone = [b for b in groups[0] if b.arm in (ALONE.name, ALONE_AGAIN.name)]
    idle = [b for b in records.blocks if b.arm == IDLE_ROSE.name]
    machine = run.machine
    return MeasuredRun(
        run.seed,
        f"{machine['cpus']} {machine['processor']} cores",
        run.ttft_target_s,
        run.tpot_target_s,
        _sizes(machine["host_model"], 64 << 20, 64, _steps(folder, "host", first_alone)),
        _sizes(machine["guest_model"], 16 << 20, 16, _steps(folder, "guest", idle)),
        int(settings["guest_streams"]),
        int(settings["guest_prompt_tokens"]),
        int(settings["guest_output_tokens"]),
        median(_guest_tok_s(block) for block in idle),
        loads,
    )


def _groups(blocks: Iterable[CoserveBlockRecord]) -> list[list[CoserveBlockRecord]]:
    """Return blocks of the same arrivals, of which at least two were alone; steady loads first."""
    found = defaultdict[tuple[str, float, int], list[CoserveBlockRecord]](list)
    for block in blocks:
        if block.traffic is not None and block.arm in (ALONE.name, ALONE_AGAIN.name, LENDING):
            found[block.traffic, block.rate_per_s or 0.0, block.segment].append(block)
    kept = [group for group in found.values() if sum(b.arm != LENDING for b in group) > 1]
    return sorted(kept, key=lambda group: (group[0].traffic != "poisson", group[0].rate_per_s or 0))


def _load(records: CoserveRecords, blocks: Sequence[CoserveBlockRecord]) -> MeasuredLoad:
    first = blocks[0]
    served = {b.block: [r for r in records.requests if r.block == b.block] for b in blocks}
    arrivals = sorted(
        (round(r.arrival_s - first.start_s, 6), r.prompt_tokens, r.output_tokens)
        for r in served[first.block]
        if r.prompt_tokens and r.output_tokens
    )
    alone = [b for b in blocks if b.arm != LENDING]
    return MeasuredLoad(
        f"{first.traffic} {first.rate_per_s:.1f}/s",
        first.duration_s,
        tuple(arrivals),
        tuple(_repeat(served[b.block], b) for b in alone),
        tuple(_repeat(served[b.block], b) for b in blocks if b.arm == LENDING),
    )


def _repeat(requests: Sequence[Request], block: CoserveBlockRecord) -> MeasuredRepeat:
    ttft = [r.ttft_s for r in requests if r.ttft_s is not None]
    tpot = [r.tpot_s for r in requests if r.tpot_s]
    if not ttft or not tpot:
        raise RoseError(f"block {block.block}: no request was answered; see the host's log")
    return MeasuredRepeat(
        len(requests),
        percentile(ttft, 0.5),
        percentile(ttft, 0.9),
        percentile(tpot, 0.5),
        percentile(tpot, 0.9),
        sum(r.output_tokens for r in requests) / block.duration_s,
        _guest_tok_s(block),
    )


def _guest_tok_s(block: CoserveBlockRecord) -> float:
    return (block.end.guest_tokens - block.start.guest_tokens) / block.duration_s


def _steps(folder: Path, role: str, blocks: Sequence[CoserveBlockRecord]) -> StepProfile:
    """Return step times of an engine during some blocks: the median of each size, fitted.

    A step that another follows at once takes until that one begins: the engine works between them.
    """
    spans = [(round(b.start_s * 1e9), round(b.end_s * 1e9)) for b in blocks]
    seen = defaultdict[tuple[int, int], list[float]](list)
    for path in sorted(folder.glob(f"steps-{role}-*.bin")):
        steps = _records(path)
        for step, following in pairwise(steps):
            if any(begin <= step.begin_ns and step.end_ns <= end for begin, end in spans):
                at_once = following.begin_ns - step.end_ns < _AT_ONCE_NS
                end_ns = max(step.end_ns, following.begin_ns) if at_once else step.end_ns
                seen[step.tokens, step.sequences].append((end_ns - step.begin_ns) / 1e9)
    return fit_profile(
        StepSample(*size, 0, median(times))
        for size, times in seen.items()
        if len(times) >= _LEAST_SEEN
    )


def _records(path: Path) -> list[StepRecord]:
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        found = read_step_log(header + file.read(max(0, used_bytes(header) - HEADER.size)))
    return sorted(record for record in found if record.kind == STEP)


def _sizes(
    model: dict[str, object], kv_bytes: int, max_sequences: int, steps: StepProfile
) -> EngineSizes:
    width = 4 if model["dtype"] == "float32" else 2
    per_token = 2 * int(str(model["layers"])) * int(str(model["hidden"])) * width
    return EngineSizes(kv_bytes // per_token, per_token, max_sequences, steps)
