"""Raw records of a run: one schema for each file, their folders, and how they are read.

Everything a report says is computed from these files. Times are CLOCK_MONOTONIC seconds.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from bench.common.stats import read_json
from bench.load.protocol import ClientRequest, HostLatency
from rose.errors import ConfigError
from rose.logs.eventlog import log_parts, read_lines
from rose.node.guest.guard import GUEST_SAMPLES, GuestSample

RAW_FILES = (
    "client_requests.jsonl",
    "host_latency.jsonl",
    "turns.jsonl",
    "steps.jsonl",
    "trajectories.jsonl",
    "blocks.jsonl",
    "activations.jsonl",
    "events.jsonl",
    "guest.jsonl",
    "memory.jsonl",
)
# Names of events in `events.jsonl` from which claims are computed.
FORCED_REVOCATION = "forced_revocation"
GUEST_KILLED = "guest_killed"
CHUNK_REJECTED = "chunk_rejected"
EVALUATION = "eval"
TRAINER_DONE = "done"
LEASE_GRANTED = "lease_granted"
LEASE_ENDS = ("lease_released", "revoked", "lease_expired")
FIRST_TOKEN = "first_token"  # noqa: S105 - an event's name
ENGINE_SWITCHED = "engine_switched"


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Folders of one run below `out`: raw records at the top, logs and scratch beneath."""

    out: Path

    @property
    def logs(self) -> Path:
        """Logs of all processes."""
        return self.out / "logs"

    @property
    def scratch(self) -> Path:
        """Stores and weights; of no interest after the run."""
        return self.out / "scratch"

    def node(self, name: str) -> Path:
        """Raw records of one node daemon, merged when the run ends."""
        return self.logs / name

    def prepare(self) -> None:
        """Make the folders anew. Raises ConfigError rather than delete what no run wrote."""
        if self.out.exists():
            if any(self.out.iterdir()) and not (self.out / "run.json").is_file():
                raise ConfigError(f"{self.out} holds other files; choose an empty folder for --out")
            shutil.rmtree(self.out)
        for folder in (self.logs, self.scratch):
            folder.mkdir(parents=True)

    def gather(self) -> None:
        """Merge what the processes wrote into one file a kind; every raw file exists afterwards."""
        for name in RAW_FILES:
            pattern = "events-*.jsonl" if name == "events.jsonl" else name
            logs = sorted(path for path in self.logs.rglob(pattern) if path.is_file())
            parts = [part for log in logs for part in log_parts(log)]
            lines = [line for part in parts for line in _whole_lines(part)]
            with (self.out / name).open("a", encoding="utf-8") as target:
                target.writelines(lines)


def _whole_lines(path: Path) -> list[str]:
    """Lines that were written to their end: a killed process may leave half a one."""
    with path.open(encoding="utf-8") as file:
        return [line for line in file if line.endswith("\n")]


class TurnRecord(msgspec.Struct, frozen=True):
    """`turns.jsonl`: one generation call of a trajectory.

    `gap` gives, for each kind of segment, [sum of |engine logprob - trainer logprob|, tokens].
    """

    request_id: str
    trajectory: str | int
    group: str | int
    step: int | None
    turn: int
    start_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    versions: list[tuple[int, int, int]]
    segments: list[tuple[str, str, int, int]]
    attempts: int
    finish_reason: str
    gap: dict[str, tuple[float, int]]
    unstamped: int
    job: str = ""


class StepRow(msgspec.Struct, frozen=True):
    """`steps.jsonl`: one update of the policy; `version` is the one it published."""

    step: int
    start_s: float
    end_s: float
    reward_mean: float
    reward_n: int
    tokens: int
    trajectories: int
    spanning: int
    clip_fraction: float
    grad_norm: float
    version: int
    density: float
    full_bytes: int
    wire_bytes: int
    publish_s: float
    train_s: float
    job: str = ""


class TrajectoryRecord(msgspec.Struct, frozen=True):
    """`trajectories.jsonl`: one episode; `delivered` counts how often the trainer got it."""

    trajectory: str | int
    group: str | int
    step: int | None
    start_s: float
    end_s: float
    turns: int
    reward: float
    versions: list[int]
    delivered: int
    revoked_mid_turn: bool
    job: str = ""


class BlockStats(msgspec.Struct, frozen=True):
    """Counters at one moment; all of them only grow."""

    steps: int
    tokens: dict[str, int]
    host_busy_ns: int
    cpu_s: dict[str, float]


class BlockRecord(msgspec.Struct, frozen=True):
    """`blocks.jsonl`: one block of the plan as it ran."""

    block: int
    pair: int | None
    arm: Literal["leased", "frozen", "ceiling", "unmeasured"]
    segment: int | None
    start_s: float
    end_s: float
    start_stats: BlockStats
    end_stats: BlockStats

    @property
    def duration_s(self) -> float:
        """Wall time of the block."""
        return self.end_s - self.start_s

    @property
    def tokens(self) -> int:
        """Rollout tokens generated in the block, on all replicas."""
        return sum(self.end_stats.tokens.values()) - sum(self.start_stats.tokens.values())

    @property
    def steps(self) -> int:
        """Training steps finished in the block."""
        return self.end_stats.steps - self.start_stats.steps

    @property
    def host_busy_s(self) -> float:
        """Time the host was inside a step during the block."""
        return (self.end_stats.host_busy_ns - self.start_stats.host_busy_ns) / 1e9


class Activation(msgspec.Struct, frozen=True):
    """`activations.jsonl`: a replica tried to activate a version."""

    t_s: float
    replica: str
    kind: str
    version: int
    digest_ok: bool
    probe_ok: bool
    probe_max_abs_diff: float | None
    pause_s: float
    apply_s: float
    wire_bytes: int
    changed: int


class Event(msgspec.Struct, frozen=True):
    """`events.jsonl`: something happened; the fields after `event` belong to some events only.

    `crossed` has a 0 or a 1 for each held-out map, in the order in which every run has them.
    """

    t_s: float
    source: str
    event: str
    which: str | None = None
    success: float | None = None
    n: int | None = None
    crossed: str | None = None
    started: int | None = None
    delivered: int | None = None
    lost: int | None = None
    duplicated: int | None = None
    signal: int | None = None
    job: str | None = None
    replica: str | None = None
    epoch: int | None = None
    kind: str | None = None
    switch: str | None = None
    took_s: float | None = None


class MemorySample(msgspec.Struct, frozen=True):
    """`memory.jsonl`: memory of each process of the run (proportional set size)."""

    t_s: float
    bytes: dict[str, int]


class RunInfo(msgspec.Struct, frozen=True):
    """`run.json`: when the run began and ended, and what was asked of it."""

    t0_s: float
    settings: dict[str, bool | int | float | str | None]
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class Records:
    """All raw records of one run."""

    run: RunInfo
    client_requests: list[ClientRequest]
    host_latency: list[HostLatency]
    turns: list[TurnRecord]
    steps: list[StepRow]
    trajectories: list[TrajectoryRecord]
    blocks: list[BlockRecord]
    activations: list[Activation]
    events: list[Event]
    guest: list[GuestSample]
    memory: list[MemorySample]

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs where there are several, in order; none where there is one."""
        # A job that never came to a step had leases, or trajectories at least.
        names = {event.job for event in self.events if event.event == LEASE_GRANTED}
        names |= {step.job for step in self.steps} | {one.job for one in self.trajectories}
        said = sorted(name for name in names if name)
        return said if len(said) > 1 else []

    def of_job(self, job: str) -> "Records":
        """The same run as if it had this job alone: what its trainer wrote."""
        return replace(
            self,
            turns=[turn for turn in self.turns if turn.job == job],
            steps=[step for step in self.steps if step.job == job],
            trajectories=[one for one in self.trajectories if one.job == job],
            events=[event for event in self.events if event.job in (None, job)],
        )

    def blocks_of(self, arm: str) -> list[BlockRecord]:
        """The blocks of one arm in the order in which they ran."""
        return [block for block in self.blocks if block.arm == arm]

    def events_named(self, name: str) -> list[Event]:
        """The events of one name in order of time."""
        return sorted((e for e in self.events if e.event == name), key=lambda event: event.t_s)


def read_records(folder: Path) -> Records:
    """All raw records of the run in `folder`.

    Raises `RoseError` when a file is missing or malformed.
    """
    memory = folder / "memory.jsonl"
    return Records(
        run=read_json(folder / "run.json", RunInfo, "name the folder of a demo run"),
        client_requests=read_lines(folder / "client_requests.jsonl", ClientRequest),
        host_latency=read_lines(folder / "host_latency.jsonl", HostLatency),
        turns=read_lines(folder / "turns.jsonl", TurnRecord),
        steps=sorted(read_lines(folder / "steps.jsonl", StepRow), key=lambda step: step.step),
        trajectories=read_lines(folder / "trajectories.jsonl", TrajectoryRecord),
        blocks=sorted(read_lines(folder / "blocks.jsonl", BlockRecord), key=lambda b: b.block),
        activations=read_lines(folder / "activations.jsonl", Activation),
        events=read_lines(folder / "events.jsonl", Event),
        guest=read_lines(folder / GUEST_SAMPLES, GuestSample),
        memory=read_lines(memory, MemorySample) if memory.exists() else [],
    )
