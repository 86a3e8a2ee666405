"""`python -m bench.simulation`: measures a host's loads again and again, and validates by it.

measure     starts engines, plays every load five times alone and five times beside a guest
trace       writes a generated trace in the Azure format, as uneven as the recorded one of 2023
validate    plays a measured run in the simulator, and shows its error beside the repeats' spread
readings    varies what the ROSE paper leaves open, and shows which readings its figures fit
adds        compares policies under those that fit, and shows what drafts and parts of steps add
predictor   plays `rose` with the router's length predictor, with one length for all turns, and with
            levels of a feedback queue

Calibrated is by the first load: the host's step times, how long its API process takes, and how much
longer a guest's step takes beside a busy host than alone (they share cores' caches and memory, and
the API process has the other core). All other loads are predictions, and what users of the first
one see beside a guest.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, geometric_mean, median
from unittest.mock import patch

import msgspec

from bench.common.report import reported
from bench.common.stats import read_json
from bench.coserve.plan import (
    ALL_ARMS,
    ALONE,
    ALONE_AGAIN,
    IDLE_ROSE,
    ArmCell,
    BenchSettings,
    PlanBlock,
    quick_settings,
)
from bench.coserve.records import CoserveBlockRecord, CoserveRecords, read_run, written
from bench.load.protocol import Request as HostRequest
from bench.load.protocol import write_trace
from elastic_scheduler.routing import router
from elastic_scheduler.routing.predictors import LengthPredictor
from executor.step_log import STEP, StepRecord, read_step_log
from rose.command_line.output import Format, Table, View, write
from rose.errors import RoseError
from rose.simulation import (
    ClusterSpec,
    DedicatedReplicas,
    EngineFigures,
    EpisodeTurn,
    GuestSpec,
    HostPool,
    RolloutEpisode,
    RunResult,
    Scenario,
    SimulatedRun,
    TrainerSpec,
    UserRequest,
    carry_out,
    run_all,
)
from rose.simulation.setups import FROZEN_LAKE_8B, setup_scenario
from rose.simulation.tables import ROWS as PAPER_ROWS
from rose.simulation.workloads.amounts import LogNormal
from rose.simulation.workloads.episodes import FROZEN_LAKE, SessionFile
from slo import SloSpec, StepProfile, StepSample, fit_profile, percentile

MEASURED = Path("bench/results/simulation/measured.json")
REPEATS = 5
BUSY_TARGETS = (0.3, 0.6)
KIND, LAYOUT = "rose.measured_hosts", 1
LENDING = "adaptive-0.0"
# A size of step that was seen less often is as likely to be an interruption.
_LEAST_SEEN = 3
_AT_ONCE_NS = 2_000_000
# Turns begin before the load does, and requests end after it.
LEAD_S, AFTER_S = 2.0, 20.0
# The guest is in the kernel's background class: the host has the core whenever it wants it.
BACKGROUND = {"host_share": 0.99}
MOST_ERROR = 0.10
# A guest of vLLM that may not run looks again after so long (executor.vllm.guest.gate_client).
WAKE_S = 0.0005
# Turns that a guest is given, as a multiple of those that it makes alone.
_TURNS = 1.5
GUEST_TIMES = 6
# The model's KV memory comes in units of so many tokens, the engines' in blocks of 16: so there is
# a unit for each sequence that may run. It limits neither in these loads.
UNIT_TOKENS = 256
READING_POLICIES = ("fixed", "spot", "serverless", "paper")
READINGS = (
    *((episodes, 1.0, load) for load in (1.0, 0.5, 0.25) for episodes in (256, 1_024, 4_096)),
    *((episodes, 3.0, 0.5) for episodes in (256, 1_024)),
)
"""Episodes a step, length of answers and rate of users as multiples of the usual ones."""
FROZEN = ((256, 1.0, 1.0), (4_096, 1.0, 0.25), (4_096, 1.0, 0.5))
"""Readings under which policies are compared."""
# Tokens of each turn for a router that predicts no lengths.
ONE_LENGTH = 128
# Tokens of a turn, by level of the feedback queue.
LEVELS = (32, 128, 512, 2_048)
PEERS = ("fixed", "rlboost", "libra", "paper")
HEAD = ("LOAD", "FIGURE", "MEASURED", "REPEATS", "SIMULATED", "OFF", "VERDICT")


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


def _repeat(requests: Sequence[HostRequest], block: CoserveBlockRecord) -> MeasuredRepeat:
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
    return sorted(record for record in read_step_log(written(path)) if record.kind == STEP)


def _sizes(
    model: dict[str, object], kv_bytes: int, max_sequences: int, steps: StepProfile
) -> EngineSizes:
    width = 4 if model["dtype"] == "float32" else 2
    per_token = 2 * int(str(model["layers"])) * int(str(model["hidden"])) * width
    return EngineSizes(kv_bytes // per_token, per_token, max_sequences, steps)


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """One figure: repeats of a measurement beside what was simulated."""

    load: str
    figure: str
    measured: tuple[float, ...]
    simulated: float
    unit: str
    scale: float = 1.0
    calibrated: bool = False

    @property
    def off(self) -> float:
        """Error relative to the median of the repeats."""
        middle = median(self.measured)
        return self.simulated / middle - 1 if middle else 0.0

    @property
    def inside(self) -> bool:
        """True if it lies in the spread of the repeats."""
        return min(self.measured) <= self.simulated <= max(self.measured)

    @property
    def near(self) -> bool:
        """True if it is inside, or within 10% of their median."""
        return self.inside or (median(self.measured) != 0 and abs(self.off) <= MOST_ERROR)

    def cells(self) -> tuple[str, ...]:
        low, high = self.scale * min(self.measured), self.scale * max(self.measured)
        verdict = "calibrated" if self.calibrated else ("inside" if self.inside else "")
        return (
            self.load,
            self.figure,
            f"{low:.4g} to {high:.4g} {self.unit}" if high > low else f"{low:.4g} {self.unit}",
            str(len(self.measured)),
            f"{self.scale * self.simulated:.4g} {self.unit}",
            f"{self.off:+.0%}" if median(self.measured) else "",
            verdict or ("within 10%" if self.near else ""),
        )


def summary(rows: Sequence[ValidationRow]) -> Iterator[str]:
    """Yield, for each figure, the number of near predictions and the median of their errors."""
    for figure in dict.fromkeys(row.figure for row in rows):
        mine = [row for row in rows if row.figure == figure and not row.calibrated]
        near = sum(row.near for row in mine)
        error = median(abs(row.off) for row in mine if median(row.measured))
        yield (
            f"{figure}: {near} of {len(mine)} predictions inside the repeats' spread or within 10%;"
            f" off by {error:.0%} in the middle"
        )


@dataclass(frozen=True, slots=True)
class _Replay:
    """Arrivals of a load as users' traffic, after a lead, so many times one after the other."""

    load: MeasuredLoad
    times: int

    def requests(self, seed: int) -> Iterator[UserRequest]:
        del seed
        for number in range(self.times):
            for offset_s, prompt, output in self.load.arrivals:
                yield UserRequest(LEAD_S + number * self.load.seconds + offset_s, prompt, output)


@dataclass(frozen=True, slots=True)
class _Streams:
    """Turns of equal lengths, for ever."""

    prompt_tokens: int
    output_tokens: int

    def trajectory(self, seed: int, prompt: int, sample: int) -> RolloutEpisode:
        del seed, prompt, sample
        return RolloutEpisode((EpisodeTurn(self.prompt_tokens, self.output_tokens),))


def validate(measured: MeasuredRun) -> list[ValidationRow]:
    """Return all rows; the first load calibrates API time, and a guest's steps beside a host."""
    rows: list[ValidationRow] = []
    api_s, slower = 0.0, 1.0
    for number, load in enumerate(measured.loads):
        alone = _play(measured, load, "fixed")
        assert alone.users is not None
        if number == 0:
            api_s = median(r.ttft_p50_s for r in load.alone) - alone.users.ttft_s.p50
        rows += _rows(load.name, load.alone, alone, api_s, load.seconds, calibrated=number == 0)
        if load.lending:
            made_tok_s = tuple(r.guest_tok_s for r in load.lending)
            if number == 0 and median(made_tok_s) > 0:
                slower = max(1.0, _simulated_tok_s(measured, load, 1.0) / median(made_tok_s))
            lending = _play(measured, load, "paper", slower)
            rows += _rows(f"{load.name}, lending", load.lending, lending, api_s, load.seconds)
            rows.append(
                ValidationRow(
                    f"{load.name}, lending", "guest", made_tok_s,
                    _simulated_tok_s(measured, load, slower), "tok/s", calibrated=number == 0,
                )
            )  # fmt: skip
    return rows


def table(rows: Sequence[ValidationRow]) -> Table:
    return Table(HEAD, tuple(row.cells() for row in rows), right=frozenset(HEAD[2:6]))


def _rows(
    name: str,
    repeats: Sequence[MeasuredRepeat],
    simulated: RunResult,
    api_s: float,
    seconds: float,
    *,
    calibrated: bool = False,
) -> Iterator[ValidationRow]:
    users = simulated.users
    assert users is not None
    for figure, key, value in (
        ("TTFT p50", "ttft_p50_s", users.ttft_s.p50 + api_s),
        ("TTFT p90", "ttft_p90_s", users.ttft_s.p90 + api_s),
        ("TPOT p50", "tpot_p50_s", users.tpot_s.p50),
        ("TPOT p90", "tpot_p90_s", users.tpot_s.p90),
    ):
        found = tuple(getattr(repeat, key) for repeat in repeats)
        fitted = calibrated and figure == "TTFT p50"
        yield ValidationRow(name, figure, found, value, "ms", 1e3, fitted)
    yield ValidationRow(
        name, "host", tuple(r.host_tok_s for r in repeats),
        users.requests * median(r.host_tok_s / r.requests for r in repeats), "tok/s",
    )  # fmt: skip


def _simulated_tok_s(measured: MeasuredRun, load: MeasuredLoad, slower: float) -> float:
    """Return tokens a second of the guest while the load ran."""
    seconds = GUEST_TIMES * load.seconds
    before, after = (
        _play(measured, load, "paper", slower, until_s).counts["guest_tokens"]
        for until_s in (LEAD_S, LEAD_S + seconds)
    )
    return (after - before) / seconds


def _play(
    measured: MeasuredRun,
    load: MeasuredLoad,
    policy: str,
    slower: float = 1.0,
    until_s: float | None = None,
) -> RunResult:
    """Play the load under a policy, until its last requests have ended unless `until_s` says when.

    slower: steps of the guest, as a multiple of what they take alone.
    """
    host, guest = _engine("host", measured.host), _engine("guest", measured.guest, slower)
    slo = SloSpec("host", measured.ttft_target_s, measured.tpot_target_s)
    lends = policy != "fixed"
    end_s = until_s if until_s is not None else LEAD_S + load.seconds + AFTER_S
    turns = _TURNS * end_s * measured.guest_alone_tok_s / measured.guest_output_tokens
    beside = GuestSpec(
        guest, kv_base_tokens=guest.kv_tokens, slack_share=0.0, startup_s=0.0, granule_tokens=1_024,
        wake_s=WAKE_S,
    )  # fmt: skip
    trainer = TrainerSpec(
        groups=max(1, round(turns)) if lends else 1,
        samples=1,
        train_s_per_token=0.0,
        weight_bytes=1_000_000,
        concurrency=measured.guest_streams,
        max_turn_tokens=measured.guest_output_tokens + 1,
        # Alone, one turn on a dedicated engine, and then nothing until the end.
        train_s=1e6,
        steps=1,
    )
    scenario = Scenario(
        load.name,
        ClusterSpec(DedicatedReplicas(0 if lends else 1, guest), 1, HostPool(1, host, slo, beside)),
        trainer,
        _Streams(measured.guest_prompt_tokens, measured.guest_output_tokens),
        _Replay(load, 1 if until_s is None else GUEST_TIMES),
        until_s=end_s,
    )
    return carry_out(SimulatedRun(scenario, policy, measured.seed, BACKGROUND))


def _engine(name: str, sizes: EngineSizes, slower: float = 1.0) -> EngineFigures:
    alone = sizes.steps
    steps = replace(
        alone,
        base_s=slower * alone.base_s,
        per_token_s=slower * alone.per_token_s,
        per_sequence_s=slower * alone.per_sequence_s,
        per_context_token_s=slower * alone.per_context_token_s,
    )
    return EngineFigures(
        model=name,
        cards=1,
        profile=steps,
        kv_tokens=max(sizes.kv_tokens, sizes.max_sequences * UNIT_TOKENS),
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        weight_bytes=1_000_000,
        max_sequences=sizes.max_sequences,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 2, with a line, for a file or a scale that cannot be."""
    args = _parser().parse_args(argv)
    return reported("bench.simulation", lambda: int(args.run(args)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    measure = commands.add_parser("measure", help="start engines and measure; ten minutes")
    measure.add_argument("--seed", type=int, default=0)
    measure.add_argument("--raw", type=Path, default=Path("out/bench/simulation"), metavar="DIR")
    measure.add_argument("--out", type=Path, default=MEASURED, metavar="FILE")
    measure.set_defaults(run=_measure)
    trace = commands.add_parser("trace", help="for `rose sim what-if`, where there is no other")
    trace.add_argument("--out", type=Path, required=True, metavar="FILE")
    trace.add_argument("--seed", type=int, default=0)
    trace.add_argument("--hours", type=float, default=1.0, metavar="N")
    trace.add_argument("--day", action="store_true", help="with the shape of a day; at 0:00")
    trace.set_defaults(run=_trace)
    check = commands.add_parser("validate", help="play a measured run in the simulator")
    check.add_argument("measured", type=Path, nargs="?", default=MEASURED, metavar="FILE")
    check.set_defaults(run=_validate)
    readings = commands.add_parser("readings", help="FrozenLake by several readings of the paper")
    readings.add_argument("--seed", type=int, default=0)
    readings.add_argument("--scale", type=float, default=0.25, metavar="X")
    readings.add_argument("--workers", type=int, metavar="N", help="default: one a core")
    readings.set_defaults(run=_readings)
    adds = commands.add_parser("adds", help="`rose` with drafts and parts, beside other policies")
    adds.add_argument("--seeds", type=int, default=1, metavar="N")
    adds.add_argument("--scale", type=float, default=0.25, metavar="X")
    adds.add_argument("--drafts", type=float, required=True, metavar="X", help="tokens of a step")
    adds.add_argument("--workers", type=int, metavar="N", help="default: one a core")
    adds.set_defaults(run=_adds)
    predictor = commands.add_parser("predictor", help="what predictions of lengths are worth")
    predictor.add_argument("sessions", type=Path, nargs="?", help="recorded ones, not FrozenLake's")
    predictor.add_argument("--seeds", type=int, default=4, metavar="N")
    predictor.add_argument("--scale", type=float, default=0.25, metavar="X")
    predictor.set_defaults(run=_predictor)
    return parser


def _measure(args: argparse.Namespace) -> int:
    # Imported here: validating needs no engine.
    from bench.coserve.run import run_bench

    settings = quick_settings(
        args.raw, seed=args.seed, busy_targets=BUSY_TARGETS, event_rounds=0, calibration_s=9.0
    )
    run_bench(settings, repeated_blocks)
    run = extract(args.raw)
    write_measured([run], args.out)
    sys.stdout.write(f"{len(run.loads)} loads in {args.out}\n")
    return 0


def repeated_blocks(settings: BenchSettings, cells: list[ArmCell]) -> list[PlanBlock]:
    """Return every load several times, alone and lending, in random order."""
    rng = random.Random(f"rose-repeats/{settings.seed}")  # noqa: S311 - an order, not a secret
    blocks = [
        PlanBlock(arm, settings.block_s, number, 1_000 * (1 + at), cell)
        for number in range(REPEATS)
        for at, cell in enumerate(cells)
        for arm in (ALONE, ALL_ARMS[LENDING])
    ]
    blocks += [PlanBlock(IDLE_ROSE, settings.idle_block_s, n, 0) for n in range(REPEATS)]
    rng.shuffle(blocks)
    return blocks


def _trace(args: argparse.Namespace) -> int:
    write_trace(args.out, args.seed, args.hours, day=args.day)
    return 0


def _validate(args: argparse.Namespace) -> int:
    rows = [row for run in read_measured(args.measured) for row in validate(run)]
    write(View({}, tuple(summary(rows)), (table(rows),)), Format.TABLE)
    return 0


def _readings(args: argparse.Namespace) -> int:
    asked = [
        SimulatedRun(reading_scenario(*reading, args.scale), policy, args.seed)
        for reading in READINGS
        for policy in READING_POLICIES
    ]
    results = iter(run_all(asked, args.workers))
    rows = []
    for episodes, answers, load in READINGS:
        runs = {policy: [next(results)] for policy in READING_POLICIES}
        shown = [f"{episodes}", f"{answers:g}", f"{load:g}"]
        for row in PAPER_ROWS:
            value = row.measure(runs, "paper")
            shown.append(f"{value:.2f}" + " !" * (not row.low <= value <= row.high))
        for policy in ("fixed", "paper"):
            users = runs[policy][0].users
            shown.append(f"{users.ttft_s.p99:.3f}" if users is not None else "")
        rows.append(tuple(shown))
        sys.stderr.write(f"{' '.join(shown)}\n")
    head = ("EPISODES", "ANSWERS", "USERS", *(row.what.upper() for row in PAPER_ROWS))
    head += ("TTFT P99 ALONE S", "TTFT P99 S")
    write(View({}, (), (Table(head, tuple(rows), right=frozenset(head)),)), Format.TABLE)
    return 0


def _adds(args: argparse.Namespace) -> int:
    parts, drafts = {"parts": 1.0}, {"drafts": args.drafts}
    settings = {"none": {}, "parts": parts, "drafts": drafts, "both": parts | drafts}
    cells = [
        (reading, policy, name)
        for reading in FROZEN
        for name in settings
        for policy in (*PEERS, "rose")
        if policy == "rose" or name in ("none", "both")
    ]
    asked = [
        SimulatedRun(reading_scenario(*reading, args.scale), policy, seed, settings[name])
        for reading, policy, name in cells
        for seed in range(args.seeds)
    ]
    results = iter(run_all(asked, args.workers))
    found = {cell: fmean(next(results).tokens_per_s for _ in range(args.seeds)) for cell in cells}
    rows, ahead = [], defaultdict[str, list[float]](list)
    for reading, name in product(FROZEN, settings):
        rates = {policy: found.get((reading, policy, name)) for policy in (*PEERS, "rose")}
        base = found[reading, "fixed", "none"]
        shown = [f"{rate / base:.2f}" if rate else "" for rate in rates.values()]
        for kind in ("none", "both"):
            best = max(found[reading, policy, kind] for policy in PEERS)
            ahead[f"{name}/{kind}"].append(found[reading, "rose", name] / best)
            shown.append(f"{ahead[f'{name}/{kind}'][-1]:.2f}")
        rows.append((" ".join(f"{value:g}" for value in reading), name, *shown))
    for name in settings:
        means = [geometric_mean(ahead[f"{name}/{kind}"]) for kind in ("none", "both")]
        rows.append(("all", name, *[""] * (1 + len(PEERS)), *(f"{mean:.2f}" for mean in means)))
    head = ("READING", "WITH", *(name.upper() for name in (*PEERS, "rose")))
    head += ("OVER THE BEST", "OVER THE BEST WITH BOTH")
    write(View({}, (), (Table(head, tuple(rows), right=frozenset(head[2:])),)), Format.TABLE)
    return 0


class OneLength(LengthPredictor):
    """Arm without predictions: all turns are expected to be of one length."""

    def expected(self, job: str, session: str, group: str, budget_tokens: int) -> int:
        del job, session, group
        return min(budget_tokens, ONE_LENGTH)

    def is_long(self, job: str, expected_tokens: int) -> bool:
        del job, expected_tokens
        return False


class FeedbackLevels(LengthPredictor):
    """Arm with a multi-level feedback queue in place of predictions, after Libra's.

    A trajectory begins on the level of the shortest turns. One that outgrows its level moves it up,
    and one that comes back from its tool well below it moves it down.
    """

    def __init__(self, names_kept: int = 0) -> None:
        super().__init__(names_kept)
        self._levels: defaultdict[str, int] = defaultdict(int)

    def observe(self, job: str, session: str, group: str, tokens: int) -> None:
        del job, group
        level = self._levels[session]
        if tokens > LEVELS[level]:
            self._levels[session] = min(level + 1, len(LEVELS) - 1)
        elif level and tokens <= LEVELS[level - 1]:
            self._levels[session] = level - 1

    def forget(self, session: str) -> None:
        self._levels.pop(session, None)

    def expected(self, job: str, session: str, group: str, budget_tokens: int) -> int:
        del job, group
        return min(budget_tokens, LEVELS[self._levels[session]])

    def is_long(self, job: str, expected_tokens: int) -> bool:
        del job
        return expected_tokens >= LEVELS[-1]


LENGTH_ARMS = {"PREDICTED": LengthPredictor, "ONE LENGTH": OneLength, "FEEDBACK": FeedbackLevels}


def _predictor(args: argparse.Namespace) -> int:
    scenario = setup_scenario("frozen_lake-8b", steps=2, scale=args.scale)
    if args.sessions is not None:
        scenario = replace(scenario, rollouts=SessionFile.read(args.sessions), until_s=36_000.0)
    found: dict[str, list[float]] = {}
    for name, arm in LENGTH_ARMS.items():
        with patch.object(router, "LengthPredictor", arm):
            runs = [carry_out(SimulatedRun(scenario, "rose", seed)) for seed in range(args.seeds)]
        found[name] = [run.tokens_per_s for run in runs]
    rows = [
        (f"{seed}", *(f"{tokens_s:.0f}" for tokens_s in of_arms))
        for seed, of_arms in enumerate(zip(*found.values(), strict=True))
    ]
    means = [geometric_mean(tokens_s) for tokens_s in found.values()]
    rows.append(("mean", *(f"{mean:.0f}" for mean in means)))
    rows.append(("predicted over it", *(f"{means[0] / mean:.3f}" for mean in means)))
    head = ("SEED", *found)
    write(View({}, (), (Table(head, tuple(rows), right=frozenset(head)),)), Format.TABLE)
    return 0


def reading_scenario(episodes: int, answers: float, load: float, scale: float) -> Scenario:
    """Return FrozenLake with so many episodes a step, `answers` times as long, and users' load."""
    scenario = setup_scenario("frozen_lake-8b", steps=2, load=load, scale=scale)
    usual = FROZEN_LAKE.each.output
    assert isinstance(usual, LogNormal)
    output = replace(usual, median=answers * usual.median, most=answers * usual.most)
    job = replace(FROZEN_LAKE_8B, batch=episodes).scaled(scale)
    return replace(
        scenario,
        name=f"{episodes} episodes, answers x {answers:g}, users x {load:g}",
        trainer=job.trainer(scenario.trainer.steps),
        rollouts=replace(FROZEN_LAKE, each=replace(FROZEN_LAKE.each, output=output)),
        until_s=36_000.0,
    )


if __name__ == "__main__":
    sys.exit(main())
