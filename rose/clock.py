"""Clock of leases: it counts the time in which the machine was suspended.

On Linux CLOCK_MONOTONIC stops while the machine is suspended, CLOCK_BOOTTIME does not. Times that
another machine counts too use the latter: the lead in the store, a node's leases, the silence of
its scheduler, the stall of its session. Times that processes of one machine compare use the
former: the control page, whose reader is suspended with its writer.

A hypervisor that stops a machine together with its clocks is visible to neither. Messages that
waited for such a machine are taken as they are read; only its peers' keepalives end its streams.
"""

import time
from collections.abc import Callable


def boot_clock_s() -> float:
    """Return seconds of a clock that runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Stall:
    """A gap between two looks at a clock that is longer than `limit_s`: this process was stopped.

    Messages of its peers from that time are still unread, and were true when they were sent. Look
    more often than the limit, and before any message is acted on.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = boot_clock_s) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._looked_s = clock()

    def look(self) -> float:
        """Return the seconds that the process was suspended since the last look, else 0."""
        before_s, self._looked_s = self._looked_s, self._clock()
        gap_s = self._looked_s - before_s
        return gap_s if gap_s > self._limit_s else 0.0
