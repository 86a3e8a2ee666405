"""The raw records of a run, beside `client_requests.jsonl` and `host_latency.jsonl`.

`run.json`, `blocks.jsonl`, `events.jsonl`, `guest.jsonl` (rose.node.grants.guard_thread) and
`steps-<role>-<pid>.bin` (executor.step_log).
Times are CLOCK_MONOTONIC seconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rose.bench.coserve.steps import StepTimes, read_steps
from rose.decoding import BAD_BYTES
from rose.errors import RoseError
from rose.load.protocol import ClientRequest, HostLatency, Request, join_requests
from rose.logs.eventlog import read_lines
from rose.node.grants.guard_thread import GUEST_SAMPLES, GuestSample

RUN, BLOCKS, EVENTS = "run.json", "blocks.jsonl", "events.jsonl"
CLIENT_REQUESTS, HOST_LATENCY = "client_requests.jsonl", "host_latency.jsonl"


class Counters(msgspec.Struct, frozen=True):
    """Engines' own counters at one moment: they only grow while an engine lives."""

    host_busy_ns: int
    host_preemptions: int
    guest_tokens: int
    naive_tokens: int


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One block as it ran; `busy_target`, `traffic` and `rate_per_s` are absent without load.

    isolation: how the kernel schedules the guest of the arm.
    """

    block: int
    arm: str
    round: int
    segment: int
    busy_target: float | None
    traffic: str | None
    rate_per_s: float | None
    policy: str | None
    slack_share: float | None
    isolation: str
    start_s: float
    end_s: float
    start: Counters
    end: Counters

    @property
    def duration_s(self) -> float:
        """Wall time under load."""
        return self.end_s - self.start_s

    @property
    def guest_tokens(self) -> int:
        """Tokens that either guest generated in it; a restarted guest counted from zero."""
        tokens = self.end.guest_tokens - self.start.guest_tokens
        return max(0, tokens) + self.end.naive_tokens - self.start.naive_tokens


class Calibration(msgspec.Struct, frozen=True):
    """The rate found for one cell, and what each try measured: [rate per second, busy]."""

    busy_target: float
    traffic: str
    rate_per_s: float
    tries: list[tuple[float, float]]


class RunInfo(msgspec.Struct, frozen=True):
    """`run.json`."""

    seed: int
    quick: bool
    settings: dict[str, Any]
    machine: dict[str, Any]
    capacity_rps: float
    calibrations: list[Calibration]
    ttft_target_s: float
    tpot_target_s: float
    targets_from: str


class Event(msgspec.Struct, frozen=True):
    """`events.jsonl`: what was done to the guest in a window; times of what it took."""

    t_s: float
    source: str
    event: str
    block: int | None = None
    took_s: float | None = None
    ok: bool | None = None
    detail: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Records:
    """All raw records of one run; `steps` by role."""

    run: RunInfo
    blocks: list[BlockRecord]
    requests: list[Request]
    events: list[Event]
    steps: dict[str, StepTimes]
    guest: list[GuestSample]


def read_run(folder: Path) -> Records:
    """All raw records of the run in `folder`; RoseError when one is missing or malformed."""
    return Records(
        run=_run_info(folder / RUN),
        blocks=read_lines(folder / BLOCKS, BlockRecord),
        requests=join_requests(
            read_lines(folder / CLIENT_REQUESTS, ClientRequest),
            read_lines(folder / HOST_LATENCY, HostLatency),
        ),
        events=read_lines(folder / EVENTS, Event),
        steps={role: read_steps(folder, role) for role in ("host", "guest")},
        guest=read_lines(folder / GUEST_SAMPLES, GuestSample),
    )


def _run_info(path: Path) -> RunInfo:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except OSError as error:
        raise RoseError(f"{path}: cannot be read; name the folder of a finished run") from error
    except BAD_BYTES as error:
        raise RoseError(f"{path}: {error}") from error
