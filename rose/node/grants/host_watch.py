"""Watch over the host: the identity of its process, and the latencies of its requests.

`HostProcess` checks that the publisher on the page is the process that the node means, and that it
still runs. `HostWatch` keeps each request's latencies and sums up the last of them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from executor import ControlPage, LatencyRecord, SeatState
from executor.control_page.latency_ring import START, Cursor
from executor.freeze_reason import FreezeReason
from rose.logs.eventlog import JsonlLog
from rose.process.procfs import ProcessIdentity, ProcessStat, pid_namespace
from slo import percentile

_MOST_ANCESTORS: Final = 64


class HostProcess:
    """The host's process, told apart from a later one of its number.

    Numbers are hints: what they cannot say, because the host has a process namespace of its own or
    /proc hides it, is left to the lock on the page. What they do say against a host counts.
    """

    def __init__(self, pid: int | None) -> None:
        """`pid`: of the host's first process, or None; pinned now."""
        self._pid = pid
        self._identity = None if pid is None else ProcessIdentity.of(pid)
        self._own_namespace = pid_namespace()
        self._judged: tuple[int, int] | None = None
        self._foreign = False

    @property
    def ended(self) -> bool:
        """True if the named process has ended, even where its number is in use again."""
        return self._pid is not None and (self._identity is None or not self._identity.running)

    def doubt(self, seat: SeatState | None) -> FreezeReason | None:
        """HOST_DEAD, HOST_FOREIGN, or None where nothing speaks against who holds the seat."""
        if self.ended:
            return FreezeReason.HOST_DEAD
        if seat is None or not seat.started or seat.pid_namespace != self._own_namespace:
            return None
        stat = ProcessStat.of(seat.pid)
        if stat is None or stat.ended or stat.started != seat.started:
            # A child of a dead host may hold on to its lock.
            return FreezeReason.HOST_DEAD
        writer = seat.pid, seat.started
        if writer != self._judged:
            self._judged, self._foreign = writer, not self._begot(seat.pid)
        return FreezeReason.HOST_FOREIGN if self._foreign else None

    def _begot(self, pid: int) -> bool:
        """Return True if the process is the named one or its descendant, like an engine core."""
        if self._pid is None:
            return True
        for _ in range(_MOST_ANCESTORS):
            if pid == self._pid:
                return True
            stat = ProcessStat.of(pid)
            if stat is None or stat.parent <= 1:
                return False
            pid = stat.parent
        return False


HOST_LATENCY = "host_latency.jsonl"
WINDOW_S = 10.0
_NS = 1e9

logger = logging.getLogger("rose.node")


@dataclass(frozen=True, slots=True)
class HostSummary:
    """Latencies over the last `window_s`; zeros when no request finished in it."""

    requests: int = 0
    window_s: float = WINDOW_S
    ttft_p50_s: float = 0.0
    ttft_p95_s: float = 0.0
    tpot_p50_s: float = 0.0
    tpot_p95_s: float = 0.0


class HostWatch:
    """Drains the latency ring of a control page into a log and a short window."""

    def __init__(
        self,
        log: JsonlLog,
        on_record: Callable[[LatencyRecord], None] = lambda _: None,
        cursor: Cursor = START,
        host: str = "",
    ) -> None:
        """`cursor`: the first records to take; those before it an earlier daemon has taken.

        `host`: its name, for the log's lines, where a node may have several.
        """
        self._named = {"host": host} if host else {}
        self._on_record = on_record
        self._log = log
        self._window: deque[LatencyRecord] = deque(maxlen=4_096)
        self._cursor = cursor
        self.lost = 0

    def drain(self, page: ControlPage) -> None:
        """Take what is new; `lost` counts the records that were not to be had."""
        drained = page.latency.drain(self._cursor)
        if drained.lost and not self.lost:
            logger.warning(
                "latencies of the host were written over before they were read, or torn; they are"
                " counted as lost"
            )
        self.lost += drained.lost
        self._cursor = drained.cursor
        for record in drained.records:
            self._window.append(record)
            self._log.write(_as_json(record) | self._named)
            self._on_record(record)

    def summary(self) -> HostSummary:
        """Return the latencies of the last ten seconds."""
        since_ns = time.monotonic_ns() - int(WINDOW_S * _NS)
        recent = [record for record in tuple(self._window) if record.finished_ns >= since_ns]
        if not recent:
            return HostSummary()
        ttft = [record.ttft_ns / _NS for record in recent]
        tpot = [record.tpot_ns / _NS for record in recent if record.tpot_ns] or [0.0]
        return HostSummary(
            requests=len(recent),
            ttft_p50_s=percentile(ttft, 0.5),
            ttft_p95_s=percentile(ttft, 0.95),
            tpot_p50_s=percentile(tpot, 0.5),
            tpot_p95_s=percentile(tpot, 0.95),
        )


def _as_json(record: LatencyRecord) -> dict[str, object]:
    return {
        "request_id": record.request_id,
        "finished_s": record.finished_ns / _NS,
        "ttft_s": record.ttft_ns / _NS,
        "tpot_s": record.tpot_ns / _NS if record.tpot_ns else None,
        "e2e_s": record.e2e_ns / _NS,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
    }
