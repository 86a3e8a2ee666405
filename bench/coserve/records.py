"""The raw records of a run, beside `client_requests.jsonl` and `host_latency.jsonl`.

`run.json`, `blocks.jsonl`, `events.jsonl`, `guest.jsonl` (rose.node.guest.guard) and
`steps-<role>-<pid>.bin` (executor.step_log).
Times are CLOCK_MONOTONIC seconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.common.stats import read_json
from bench.load.protocol import ClientRequest, HostLatency, Request, join_requests
from executor.step_log import ARRIVAL, HEADER, STEP, checked_records, used_bytes
from rose.errors import RoseError
from rose.logs.eventlog import read_lines
from rose.node.guest.guard import GUEST_SAMPLES, GuestSample

Ints = NDArray[np.int64]
Span = tuple[float, float]
_KIND, _BEGIN, _END, _CPU, _SAMPLED = 0, 1, 2, 3, 6
_NS = 1e9
RUN, BLOCKS, EVENTS = "run.json", "blocks.jsonl", "events.jsonl"
CLIENT_REQUESTS, HOST_LATENCY = "client_requests.jsonl", "host_latency.jsonl"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of one role in order of time, and the arrivals that its engine saw; all in ns.

    pickups: time from the API process to the engine, of each arrival.
    """

    begin: Ints
    end: Ints
    cpu: Ints
    sampled: Ints
    arrivals: Ints
    pickups: Ints

    @classmethod
    def of(cls, records: Ints) -> "StepTimes":
        """Convert records of shape [n, 7] (executor.step_log)."""
        records = records[np.argsort(records[:, _BEGIN], kind="stable")]
        steps = records[records[:, _KIND] == STEP]
        arrivals = records[records[:, _KIND] == ARRIVAL]
        arrivals = arrivals[np.argsort(arrivals[:, _END], kind="stable")]
        return cls(
            begin=steps[:, _BEGIN],
            end=steps[:, _END],
            cpu=steps[:, _CPU],
            sampled=steps[:, _SAMPLED],
            arrivals=arrivals[:, _END],
            pickups=arrivals[:, _END] - arrivals[:, _BEGIN],
        )

    def busy_s(self, span: Span) -> float:
        """Return the time inside a step during `span` (seconds)."""
        start, end = _ns(span)
        overlap = np.minimum(self.end, end) - np.maximum(self.begin, start)
        return float(np.clip(overlap, 0, None).sum()) / _NS

    def sampled_in(self, span: Span) -> int:
        """Return the tokens of the steps that ended in `span`."""
        start, end = _ns(span)
        return int(self.sampled[(self.end > start) & (self.end <= end)].sum())

    def durations_s(self, span: Span) -> tuple[list[float], list[float]]:
        """Return (wall, cpu) seconds of each step that began in `span`."""
        start, end = _ns(span)
        inside = (self.begin >= start) & (self.begin < end)
        wall = (self.end[inside] - self.begin[inside]) / _NS
        return wall.tolist(), (self.cpu[inside] / _NS).tolist()

    def arrivals_in(self, span: Span) -> Ints:
        """Return the times of the arrivals in `span`."""
        start, end = _ns(span)
        return self.arrivals[(self.arrivals >= start) & (self.arrivals < end)]

    def pickups_s(self, span: Span) -> list[float]:
        """Return the seconds from the API process to the engine of requests seen in `span`."""
        start, end = _ns(span)
        inside = (self.arrivals >= start) & (self.arrivals < end)
        return [float(ns) / _NS for ns in self.pickups[inside]]


def yields_s(guest: StepTimes, arrivals: Ints) -> list[float]:
    """Return, of each arrival that found the guest in a step, the seconds until its last step
    ended.

    With asynchronous scheduling two steps are in flight; the log lets the second begin in the
    nanosecond in which the first ends. Both are waited for, as the device has to do both.
    """
    if not len(guest.begin):
        return []
    last = np.searchsorted(guest.begin, arrivals, side="right") - 1
    known = last >= 0
    last, arrivals = last[known], arrivals[known]
    following = np.minimum(last + 1, len(guest.begin) - 1)
    inside = guest.end[last] > arrivals
    last = np.where(inside & (guest.begin[following] == guest.end[last]), following, last)
    return [float(ns) / _NS for ns in (guest.end[last] - arrivals)[inside]]


def starts_s(host: StepTimes, arrivals: Ints) -> list[float]:
    """Return, of each arrival, the seconds until the host's next step began."""
    following = np.searchsorted(host.begin, arrivals, side="left")
    known = following < len(host.begin)
    return [float(ns) / _NS for ns in host.begin[following[known]] - arrivals[known]]


def read_steps(folder: Path, role: str) -> StepTimes:
    """Return the steps of every process of a role. Raises RoseError for a damaged log."""
    found = [np.empty((0, 7), dtype=np.int64)]
    for path in sorted(folder.glob(f"steps-{role}-*.bin")):
        try:
            body = checked_records(written(path))
        except ValueError as error:
            raise RoseError(f"{path}: {error}") from error
        found.append(np.frombuffer(body, dtype=np.int64).reshape(-1, 7))
    return StepTimes.of(np.concatenate(found))


def written(path: Path) -> bytes:
    """Return the written part of a log, which may still grow and is mostly a hole."""
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            return header
        return header + file.read(max(0, used_bytes(header) - HEADER.size))


def _ns(span: Span) -> tuple[int, int]:
    return round(span[0] * _NS), round(span[1] * _NS)


class Counters(msgspec.Struct, frozen=True):
    """Engines' own counters at one moment: they only grow while an engine lives."""

    host_busy_ns: int
    host_preemptions: int
    guest_tokens: int
    naive_tokens: int


class CoserveBlockRecord(msgspec.Struct, frozen=True, kw_only=True):
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
        return self.end_s - self.start_s

    @property
    def guest_tokens(self) -> int:
        """Tokens of either guest in the block; a restarted guest counts from zero."""
        tokens = self.end.guest_tokens - self.start.guest_tokens
        return max(0, tokens) + self.end.naive_tokens - self.start.naive_tokens


class Calibration(msgspec.Struct, frozen=True):
    """Rate of one cell, and the [rate per second, busy] of each try."""

    busy_target: float
    traffic: str
    rate_per_s: float
    tries: list[tuple[float, float]]


class CoserveRunInfo(msgspec.Struct, frozen=True):
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


class CoserveEvent(msgspec.Struct, frozen=True):
    """`events.jsonl`: a drill in a window, and its duration."""

    t_s: float
    source: str
    event: str
    block: int | None = None
    took_s: float | None = None
    ok: bool | None = None
    detail: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CoserveRecords:
    """All raw records of one run; `steps` by role."""

    run: CoserveRunInfo
    blocks: list[CoserveBlockRecord]
    requests: list[Request]
    events: list[CoserveEvent]
    steps: dict[str, StepTimes]
    guest: list[GuestSample]


def read_requests(folder: Path) -> list[Request]:
    """Return all host requests that are recorded in a folder."""
    return join_requests(
        read_lines(folder / CLIENT_REQUESTS, ClientRequest),
        read_lines(folder / HOST_LATENCY, HostLatency),
    )


def read_run(folder: Path) -> CoserveRecords:
    """Read all raw records of a run. Raises RoseError when one is missing or malformed."""
    return CoserveRecords(
        run=read_json(folder / RUN, CoserveRunInfo, "name the folder of a finished run"),
        blocks=read_lines(folder / BLOCKS, CoserveBlockRecord),
        requests=read_requests(folder),
        events=read_lines(folder / EVENTS, CoserveEvent),
        steps={role: read_steps(folder, role) for role in ("host", "guest")},
        guest=read_lines(folder / GUEST_SAMPLES, GuestSample),
    )
