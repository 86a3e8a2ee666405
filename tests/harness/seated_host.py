"""SeatedHost: a host as its page sees it, for tests that have no engine of a host."""

import time
from collections.abc import Callable
from typing import Any

from executor import ControlPage, Grant, GrantMode, HostState, HostView, SeatState

SETTLED_NS = 2_000_000_000
GRANT_NS = 500_000_000


def believed(state: HostState | None, now_ns: int) -> HostView:
    """A state of which nothing but itself can be doubted."""
    seat = SeatState(taken_ns=0, beat_ns=now_ns)
    return HostView(state, seat, seated=True, vetoed=False, replaced=False)


def granted(page: ControlPage, **changes: Any) -> ControlPage:
    """Write a grant of this moment; it lets a guest compute where nothing else is said."""
    now_ns = time.monotonic_ns()
    live: dict[str, Any] = {"mode": GrantMode.RUN, "token_budget": 8, "max_sequences": 8}
    live |= {"heartbeat_ns": now_ns, "expiry_ns": now_ns + GRANT_NS}
    page.grant.write(Grant(**live | changes))
    return page


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
