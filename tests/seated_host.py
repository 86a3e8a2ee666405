"""SeatedHost: a host as its page sees it, for tests that have no engine of a host."""

import time
from collections.abc import Callable
from typing import Any

from executor import ControlPage, HostState, HostView, SeatState

SETTLED_NS = 2_000_000_000


def believed(state: HostState | None, now_ns: int) -> HostView:
    """A state of which nothing but itself can be doubted."""
    seat = SeatState(taken_ns=0, beat_ns=now_ns)
    return HostView(state, seat, seated=True, vetoed=False, replaced=False)


class SeatedHost:
    """Holds the seat for long enough to be believed; whatever it tells, it beats."""

    def __init__(self, page: ControlPage, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self.seat = page.take_host(clock_ns() - SETTLED_NS)

    def tell(self, **state: Any) -> None:
        """Publish the state of this moment; idle where nothing else is said."""
        now_ns = self._clock_ns()
        self.seat.write(HostState(**({"heartbeat_ns": now_ns} | state)))
        self.seat.beat(now_ns)

    def beat(self) -> None:
        self.seat.beat(self._clock_ns())

    def close(self) -> None:
        self.seat.close()
