"""What guard and guest may believe of the host: one look at its page, and what speaks against it.

A state counts when all of this holds, and the host counts as busy otherwise:

    the file at the page's path is the one that is mapped
    a living process holds the seat, for SETTLE_NS at least, and beat within BEAT_STALE_NS
    nobody holds the veto: no engine serves here that cannot publish
    the host section is whole and was written by who holds the seat
"""

from dataclasses import dataclass
from typing import Final

from executor.sections import HostState, SeatState

BEAT_STALE_NS: Final = 1_000_000_000
"""A host beats four times as often, from a thread of its own: an idle engine runs no other code."""
SETTLE_NS: Final = 1_000_000_000
"""In which any other engine of the path has seen that the file is new, and vetoed."""
CLOCK_TOLERANCE_NS: Final = 1_000_000
"""Two processes read one clock, yet one may have stamped a little after the other looked."""

PAGE_REPLACED: Final = "page_replaced"
NO_HOST: Final = "no_host"
HOST_VETO: Final = "host_veto"
HOST_STARTING: Final = "host_starting"
HOST_SILENT: Final = "host_silent"
HOST_UNREADABLE: Final = "host_unreadable"


@dataclass(frozen=True, slots=True)
class HostSight:
    """Sections as read, None for one that cannot be; `seated`, `vetoed`: whether the lock is held.

    The default is what nobody may believe.
    """

    state: HostState | None = None
    seat: SeatState | None = None
    seated: bool = False
    vetoed: bool = True
    replaced: bool = True

    def doubt(self, now_ns: int) -> str | None:
        """Why the state counts for nothing, one of this module's words; None when it counts."""
        state, seat = self.state, self.seat
        if self.replaced:
            return PAGE_REPLACED
        if not self.seated:
            return NO_HOST
        if self.vetoed:
            return HOST_VETO
        if seat is None or state is None:
            return HOST_UNREADABLE
        if now_ns - seat.taken_ns < SETTLE_NS or state.heartbeat_ns < seat.taken_ns:
            return HOST_STARTING
        # A heartbeat from the future proves nothing about the present.
        if not -CLOCK_TOLERANCE_NS <= now_ns - seat.beat_ns <= BEAT_STALE_NS:
            return HOST_SILENT
        return None

    def believed(self, now_ns: int) -> HostState | None:
        """The state, None while anything speaks against it."""
        return None if self.doubt(now_ns) else self.state
