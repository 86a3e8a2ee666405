"""Publisher of a host's state: an engine's work as the control page's host section."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from executor.control_page.host_seat import HostSeat
from executor.control_page.seqlock_records import HostState
from executor.deadline_tracker import DeadlineTracker
from executor.host.kv_lender import KvLent
from executor.step_log import StepLog


class StatePublisher(ABC):
    """Base of the engines' publishers; one writes to the page about once a step.

    The changes of an idle host to busy and of a busy one to idle are published at once. Others wait
    for the next moment of the same turn of the engine's loop: arrivals, and the end of a step while
    another is in flight, for the step that follows.

    The cost of a step grows with its changes, not with the number of running requests: see
    `executor.deadline_tracker`, and `make bench-host-overhead`. Busy time is the time in which at
    least one step with work is in flight; asynchronous scheduling keeps two of them there.
    """

    tracker: ClassVar[type[DeadlineTracker]] = DeadlineTracker

    def __init__(
        self,
        seat: HostSeat,
        ttft_s: float,
        tpot_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        step_log: StepLog | None = None,
        lent: Callable[[], KvLent] = KvLent,
    ) -> None:
        """lent: returns the present loan of KV memory."""
        self._write = seat.write_packed
        # Order of what `_publish` packs directly: a HostState would cost as much again.
        self._pack = HostState.packer(
            "step_seq",
            "in_step",
            "running",
            "waiting",
            "queued_prefill_tokens",
            "earliest_prefill_deadline_ns",
            "earliest_decode_deadline_ns",
            "kv_used",
            "kv_total",
            "busy_ns",
            "last_step_ns",
            "heartbeat_ns",
            *KvLent._fields,
        )
        self._step_log = step_log
        self._lent = lent
        self._clock_ns = clock_ns
        self._deadlines = self.tracker(round(ttft_s * 1e9), round(tpot_s * 1e9))
        self._steps_in_flight = 0
        self._step_seq = 0
        self._step_began_ns = 0
        self._busy_until_ns = 0
        self._busy_ns = 0
        self._last_step_ns = 0
        self._published_idle = True
        self._unpublished = False

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return self._deadlines.queued_prefill_tokens

    def publish(self) -> None:
        """Publish the present state: of a host that starts, or one whose loan changed."""
        self._publish(self._clock_ns())

    def _step_begins(self, began_ns: int) -> None:
        """Record a scheduled step with work; its scheduling began at `began_ns`."""
        if self._steps_in_flight == 0:
            self._step_began_ns = self._busy_until_ns = began_ns
            if self._step_log is not None:
                self._step_log.begin()
        self._steps_in_flight += 1
        self._step_seq += 1

    def _step_ends(self, now_ns: int, tokens: int, sequences: int) -> None:
        """Record that the oldest step in flight was processed, with its tokens and sequences."""
        self._steps_in_flight = max(0, self._steps_in_flight - 1)
        self._busy_ns += now_ns - self._busy_until_ns
        self._last_step_ns = now_ns - self._step_began_ns
        if self._step_log is not None:
            self._step_log.step(self._step_began_ns, now_ns, tokens, sequences)
        self._step_began_ns = self._busy_until_ns = now_ns

    def _arrives(self, now_ns: int, arrived_ns: int, prompt_tokens: int | None) -> None:
        """Publish at once that an idle host has a request; None for one that was put back."""
        self._unpublished = True
        if self._published_idle:
            self._publish(now_ns)
            # Its arrival is published; that it runs from now on is not.
            self._unpublished = True
        if self._step_log is not None and prompt_tokens is not None:
            self._step_log.arrival(arrived_ns, now_ns, prompt_tokens)

    @abstractmethod
    def _figures(self) -> tuple[int, int, int, int]:
        """Return running and waiting requests, and used and all KV blocks."""

    def _publish(self, now_ns: int) -> None:
        running, waiting, kv_used, kv_total = self._figures()
        deadlines = self._deadlines
        self._published_idle = not (self._steps_in_flight or running or waiting)
        self._unpublished = False
        self._write(
            self._pack(
                self._step_seq,
                self._steps_in_flight > 0,
                running,
                waiting,
                deadlines.queued_prefill_tokens,
                deadlines.earliest_prefill_ns,
                deadlines.earliest_decode_ns,
                kv_used,
                kv_total,
                self._busy_ns,
                self._last_step_ns,
                now_ns,
                *self._lent(),
            )
        )
