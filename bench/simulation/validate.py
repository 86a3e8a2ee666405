"""Validation of the simulator: it plays the loads of a measured run, and its error is shown.

Calibrated is by the first load: the host's step times, how long its API process takes, and how much
longer a guest's step takes beside a busy host than alone (they share cores' caches and memory, and
the API process has the other core). All other loads are predictions, and what users of the first
one see beside a guest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.simulation.measured import EngineSizes, MeasuredLoad, MeasuredRepeat, MeasuredRun
from rose.command_line.output import Table
from rose.simulation import (
    ClusterSpec,
    DedicatedPool,
    EngineSpec,
    GuestSpec,
    HostPool,
    ProfiledSteps,
    Request,
    RunResult,
    Scenario,
    TrainerSpec,
    Trajectory,
    Turn,
)
from rose.simulation.run import run
from slo import SloSpec

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
COLUMNS = ("LOAD", "FIGURE", "MEASURED", "REPEATS", "SIMULATED", "OFF", "VERDICT")


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

    def requests(self, seed: int) -> Iterator[Request]:
        del seed
        for number in range(self.times):
            for offset_s, prompt, output in self.load.arrivals:
                yield Request(LEAD_S + number * self.load.seconds + offset_s, prompt, output)


@dataclass(frozen=True, slots=True)
class _Streams:
    """Turns of equal lengths, for ever."""

    prompt_tokens: int
    output_tokens: int

    def trajectory(self, seed: int, prompt: int, sample: int) -> Trajectory:
        del seed, prompt, sample
        return Trajectory((Turn(self.prompt_tokens, self.output_tokens),))


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
                slower = max(1.0, _guest_tok_s(measured, load, 1.0) / median(made_tok_s))
            lending = _play(measured, load, "paper", slower)
            rows += _rows(f"{load.name}, lending", load.lending, lending, api_s, load.seconds)
            rows.append(
                ValidationRow(
                    f"{load.name}, lending", "guest", made_tok_s,
                    _guest_tok_s(measured, load, slower), "tok/s", calibrated=number == 0,
                )
            )  # fmt: skip
    return rows


def table(rows: Sequence[ValidationRow]) -> Table:
    return Table(COLUMNS, tuple(row.cells() for row in rows), right=frozenset(COLUMNS[2:6]))


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


def _guest_tok_s(measured: MeasuredRun, load: MeasuredLoad, slower: float) -> float:
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
        ClusterSpec(DedicatedPool(0 if lends else 1, guest), 1, HostPool(1, host, slo, beside)),
        trainer,
        _Streams(measured.guest_prompt_tokens, measured.guest_output_tokens),
        _Replay(load, 1 if until_s is None else GUEST_TIMES),
        until_s=end_s,
    )
    return run(scenario, policy, measured.seed, BACKGROUND)


def _engine(name: str, sizes: EngineSizes, slower: float = 1.0) -> EngineSpec:
    alone = sizes.steps
    steps = replace(
        alone,
        base_s=slower * alone.base_s,
        per_token_s=slower * alone.per_token_s,
        per_sequence_s=slower * alone.per_sequence_s,
        per_context_token_s=slower * alone.per_context_token_s,
    )
    return EngineSpec(
        model=name,
        cards=1,
        steps=ProfiledSteps(steps),
        kv_tokens=max(sizes.kv_tokens, sizes.max_sequences * UNIT_TOKENS),
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        weight_bytes=1_000_000,
        max_sequences=sizes.max_sequences,
    )
