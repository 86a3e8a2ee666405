"""Event queue: the only clock of a simulation. Of events at one time the first added goes first."""

import heapq
from collections.abc import Callable
from typing import Final

NS: Final = 1_000_000_000
Call = Callable[[], object]


class Entry:
    """One event to come; `call` is None once it was cancelled."""

    __slots__ = ("call", "number", "time_ns")

    def __init__(self, time_ns: int, number: int, call: Call) -> None:
        self.time_ns = time_ns
        self.number = number
        self.call: Call | None = call

    def __lt__(self, other: "Entry") -> bool:
        return (self.time_ns, self.number) < (other.time_ns, other.number)

    def cancel(self) -> None:
        """Pass it over when it is due."""
        self.call = None


class EventQueue:
    """Runs calls in the order of their times, in nanoseconds from the beginning."""

    def __init__(self, start_ns: int = 0) -> None:
        self.now_ns = start_ns
        self.events = 0
        self._number = 0
        self._heap: list[tuple[int, int, Entry]] = []
        self._stopped = False

    @property
    def now_s(self) -> float:
        """Seconds of the virtual clock."""
        return self.now_ns / NS

    def at_ns(self, time_ns: int, call: Call) -> Entry:
        """Run `call` at that time, or now where it is past."""
        self._number += 1
        due_ns = time_ns if time_ns > self.now_ns else self.now_ns
        entry = Entry(due_ns, self._number, call)
        heapq.heappush(self._heap, (due_ns, self._number, entry))
        return entry

    def after_s(self, delay_s: float, call: Call) -> Entry:
        """Run `call` so many seconds from now."""
        return self.at_ns(self.now_ns + round(delay_s * NS), call)

    def every_s(self, period_s: float, call: Call, offset_s: float = 0.0) -> None:
        """Run `call` again and again, first after `offset_s` and a period."""
        period_ns = max(1, round(period_s * NS))

        def again() -> None:
            call()
            self.at_ns(self.now_ns + period_ns, again)

        self.at_ns(self.now_ns + period_ns + round(offset_s * NS), again)

    def run(self, until_s: float) -> None:
        """Run events until that time, or until `stop`."""
        heap, until_ns, pop = self._heap, round(until_s * NS), heapq.heappop
        self._stopped = False
        while heap and not self._stopped:
            if heap[0][0] > until_ns:
                self.now_ns = until_ns
                return
            due_ns, _, entry = pop(heap)
            call = entry.call
            if call is None:
                continue
            self.now_ns = due_ns
            self.events += 1
            call()

    def stop(self) -> None:
        """End `run` after the event that runs now."""
        self._stopped = True
