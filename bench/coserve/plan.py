"""Plan of a run: blocks with their arm, length and load; seeded, and shuffled in each round.

cell    one busy target and one kind of traffic
round   one segment of arrivals, replayed in every arm of the cell, in random order; before it
        each guest alone, with the host's load off
event   windows with the same arrivals: alone, then with a weight apply, a kill, a start
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.common.engines import SGLANG_PYTHON, check_sglang_python
from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.engines import EngineKind
from rose.errors import ConfigError

HOST, GUEST, NAIVE = "host", "guest", "naive"
BUSY_TARGETS = (0.3, 0.6, 0.9)
# The first window of a weight apply, a guest kill and a guest start has this load.
EVENT_BUSY = 0.6
# Below this share a policy lends nothing that is worth measuring.
LEAST_HOST_BUSY = 0.1
EVENTS = ("weight_apply", "guest_kill", "guest_start")
# Streams fill up before a block's load begins, and the host runs empty after it.
BLOCK_OVERHEAD_S = 1.2


@dataclass(frozen=True, slots=True)
class GuestLoad:
    """Load of the guest in an arm, and the largest step that its grant allows.

    streams: rollouts at a time, each with the same lengths.
    """

    streams: int
    prompt_tokens: int
    output_tokens: int
    token_budget: int


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of one run.

    block_s: host load of one block. requests_per_arm: host requests wanted in each arm.
    idle_block_s: a block of a guest alone. budget_s: time for all blocks together; rounds are
    dropped, evenly, until they fit. lent_priority: the kernel's scheduling of a guest that may use
    slack; a guest that may not is always in the background. window_s: arrivals this close share
    batches and bursts, so the bootstrap takes them together. event_rounds: windows of each event.
    max_host_busy: share of a capacity policy's `maxHostBusy`: beside a host that is busier nothing
    is lent; 1 for no limit. host, guest: their engines; the naive guest has the ROSE guest's.
    tensor_parallel: ranks of each engine.
    """

    out: Path
    seed: int = 0
    quick: bool = False
    trace: Path | None = None
    only_traffic: str | None = None
    port_base: int = 18_100
    busy_targets: tuple[float, ...] = BUSY_TARGETS
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    block_s: float = 20.0
    min_rounds: int = 3
    requests_per_arm: int = 1_050
    idle_block_s: float = 12.0
    calibration_s: float = 16.0
    calibration_tries: int = 5
    budget_s: float = 5_700.0
    window_s: float = 2.0
    event_rounds: int = 2
    event_s: float = 40.0
    lent_priority: Literal["background", "normal"] = "background"
    guest_streams: int = 16
    guest_prompt_tokens: int = 32
    guest_output_tokens: int = 64
    guest_token_budget: int = 64
    max_host_busy: float = MaxHostBusy().share
    host: EngineKind = EngineKind.VLLM
    guest: EngineKind = EngineKind.VLLM
    sglang_python: Path = SGLANG_PYTHON
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if not self.busy_targets or not all(0 < busy < 1 for busy in self.busy_targets):
            raise ConfigError("busy targets are fractions between 0 and 1; give at least one")
        if (self.ttft_target_s is None) != (self.tpot_target_s is None):
            raise ConfigError("give both --ttft-target-s and --tpot-target-s, or neither")
        if min(self.ttft_target_s or 1.0, self.tpot_target_s or 1.0) <= 0:
            raise ConfigError("targets are positive times in seconds")
        if not LEAST_HOST_BUSY <= self.max_host_busy <= 1:
            raise ConfigError(
                f"--max-host-busy {self.max_host_busy}: give a share from {LEAST_HOST_BUSY}, 1 for"
                " no limit"
            )
        if EngineKind.SGLANG in (self.host, self.guest):
            check_sglang_python(self.sglang_python)
        if self.trace is not None and not self.trace.is_file():
            raise ConfigError(f"{self.trace} is no file; name a trace in the Azure format")

    @property
    def traffics(self) -> tuple[str, ...]:
        """Poisson arrivals, and bursts: generated, or of the trace."""
        both = ("poisson", "trace" if self.trace else "bursty")
        return tuple(kind for kind in both if self.only_traffic in (None, kind))

    @property
    def guest_load(self) -> GuestLoad:
        return GuestLoad(
            self.guest_streams,
            self.guest_prompt_tokens,
            self.guest_output_tokens,
            self.guest_token_budget,
        )

    @property
    def targets_given(self) -> bool:
        return self.ttft_target_s is not None


def quick_settings(out: Path, **changes: object) -> BenchSettings:
    """Return settings for the same rows within a quarter of an hour."""
    quick: dict[str, object] = {
        "quick": True,
        "block_s": 9.0,
        "min_rounds": 1,
        "requests_per_arm": 1,
        "idle_block_s": 3.0,
        "calibration_s": 6.0,
        "calibration_tries": 3,
        "budget_s": 620.0,
        "window_s": 1.0,
        "event_rounds": 1,
        "event_s": 12.0,
    }
    return BenchSettings(out, **(quick | changes))  # type: ignore[arg-type] # names are checked there


Guest = Literal["none", "rose", "naive"]


@dataclass(frozen=True, slots=True)
class Arm:
    """Guest beside the host, and the rules of its grants."""

    name: str
    guest: Guest
    policy: str | None = None
    slack_share: float | None = None


ALONE, ALONE_AGAIN = Arm("alone", "none"), Arm("alone_again", "none")
NAIVE_ARM = Arm("naive", "naive")
ROSE_ARMS = tuple(
    Arm(f"{policy}-{share}", "rose", policy, share)
    for policy in ("paper", "adaptive")
    for share in (0.0, 0.7)
)
ARMS = (ALONE, ALONE_AGAIN, NAIVE_ARM, *ROSE_ARMS)
# Guests with the host's load off: their throughput on an idle core.
IDLE_ROSE = Arm("guest_alone", "rose", "adaptive", 0.0)
IDLE_NAIVE = Arm("naive_alone", "naive")
WARM_UP = Arm("warm_up", "rose", "adaptive", 0.0)
CALIBRATION = Arm("calibration", "none")
EVENT_ALONE = Arm("event_alone", "none")
EVENT_ARMS = tuple(Arm(event, "rose", "adaptive", 0.0) for event in EVENTS)
ALL_ARMS = {arm.name: arm for arm in (*ARMS, IDLE_ROSE, IDLE_NAIVE, EVENT_ALONE, *EVENT_ARMS)}


@dataclass(frozen=True, slots=True)
class ArmCell:
    """One host load: `rate_per_s` keeps the host busy for `busy_target` of the time, alone."""

    busy_target: float
    traffic: str
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class PlanBlock:
    """One stretch of one arm. Without a cell the host has no load."""

    arm: Arm
    duration_s: float
    round: int
    segment: int
    cell: ArmCell | None = None


def rounds_wanted(cell: ArmCell, block_s: float, requests: int, least: int) -> int:
    """Return the rounds until every arm of the cell has seen `requests`."""
    return max(least, math.ceil(requests / (cell.rate_per_s * block_s)))


def round_s(block_s: float, idle_block_s: float) -> float:
    """Return the wall time of one round of a cell."""
    return len(ARMS) * (block_s + BLOCK_OVERHEAD_S) + 2 * (idle_block_s + BLOCK_OVERHEAD_S)


def fit_rounds(wanted: list[int], one_round_s: float, budget_s: float, least: int) -> list[int]:
    """Return the rounds that the budget allows; the largest wishes shrink first."""
    rounds = list(wanted)
    while sum(rounds) * one_round_s > budget_s and max(rounds) > least:
        rounds[rounds.index(max(rounds))] -= 1
    return rounds


def make_rounds(
    cells: list[ArmCell], rounds: list[int], block_s: float, idle_block_s: float, seed: int
) -> list[PlanBlock]:
    """Return all blocks; rounds of cells are interleaved so that a slow hour hits all alike."""
    rng = random.Random(f"rose-coserve/{seed}")  # noqa: S311 - an order, not a secret
    order = [(cell, number) for cell, n in zip(cells, rounds, strict=True) for number in range(n)]
    rng.shuffle(order)
    blocks = []
    for cell, number in order:
        # Segments differ between cells, so that no arrivals are measured twice as if independent.
        segment = 1_000 * (cells.index(cell) + 1) + number
        idle = [PlanBlock(arm, idle_block_s, number, 0) for arm in (IDLE_ROSE, IDLE_NAIVE)]
        arms = [PlanBlock(arm, block_s, number, segment, cell) for arm in ARMS]
        rng.shuffle(idle)
        rng.shuffle(arms)
        blocks += [*idle, *arms]
    return blocks


def make_events(cell: ArmCell, rounds: int, event_s: float) -> list[PlanBlock]:
    """Windows of each event. The kill comes before the start that brings the guest back."""
    return [
        PlanBlock(arm, event_s, number, number, cell)
        for number in range(rounds)
        for arm in (EVENT_ALONE, *EVENT_ARMS)
    ]
