"""Clock of leases: it counts the time in which the machine was suspended, and whoever stood still.

On Linux CLOCK_MONOTONIC stands still while the machine is suspended, CLOCK_BOOTTIME does not. What
somebody else counts meanwhile goes by the latter: the lead in the store, a node's leases, for how
long its scheduler is silent, whether its session stood still. What processes of one machine compare
with each other stays with the former: the control page, whose reader is suspended with its writer.

A hypervisor that stops a machine together with its clocks is seen by neither of them. What waited
for such a machine is believed as it is read; only its peers' keepalives end its streams.
"""

import time
from collections.abc import Callable


def boot_clock_s() -> float:
    """Seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Stall:
    """A gap between two looks at a clock that is longer than `limit_s`: this process stood still.

    What its peers said meanwhile waits to be read, and was true when it was sent. Look more often
    than the limit, and before anything that was read is believed.
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
