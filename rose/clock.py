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
from datetime import UTC, datetime


def boot_clock_s() -> float:
    """Return the seconds of CLOCK_BOOTTIME, which counts the time in which the machine is
    suspended.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def utc_text(unix_s: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC, `2026-11-26T16:12:24.123Z`.

    Raises ValueError for a time outside the years 1 to 9999.
    """
    try:
        when = datetime.fromtimestamp(unix_s, UTC)
    except (OverflowError, OSError) as error:
        raise ValueError(f"{unix_s} is no time: {error}") from None
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Stall:
    """Detector of pauses of this process: gaps between two looks at a clock that exceed `limit_s`
    seconds.

    Messages that peers sent meanwhile are still unread, and were true when they were sent. Call
    `look` more often than the limit, and before any message is acted on.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = boot_clock_s) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._looked_s = clock()

    def look(self) -> float:
        """Return the seconds since the last look at the clock if they exceed the limit, else 0."""
        before_s, self._looked_s = self._looked_s, self._clock()
        gap_s = self._looked_s - before_s
        return gap_s if gap_s > self._limit_s else 0.0
