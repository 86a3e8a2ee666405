"""Stand-in for the control page of one host: the records themselves, without shared memory.

Host and guest write and read the same records as in production, at the same moments; that a section
can be torn or its writer dead is tested elsewhere, and does not happen here.
"""

from executor.control_page.page import SETTLE_NS, HostView
from executor.control_page.seqlock_records import Grant, HostState, SeatState
from rose.simulation.clock.event_queue import NS

_BEAT_NS = NS // 4


class ModelledPage:
    """Host section, seat and grant of one host."""

    def __init__(self, now_ns: int) -> None:
        self.host = HostState(heartbeat_ns=now_ns)
        self.grant: Grant | None = None
        self._taken_ns = now_ns - 2 * SETTLE_NS
        self._view: HostView | None = None
        self._beat_ns = -1

    def publish(self, state: HostState) -> None:
        """The host writes its section."""
        self.host = state
        self._view = None

    def view(self, now_ns: int) -> HostView:
        """One look at host and seat; the seat beats four times a second."""
        beat_ns = now_ns - now_ns % _BEAT_NS
        if self._view is None or beat_ns != self._beat_ns:
            self._beat_ns = beat_ns
            seat = SeatState(taken_ns=self._taken_ns, beat_ns=max(self._taken_ns, beat_ns))
            self._view = HostView(self.host, seat, seated=True, vetoed=False, replaced=False)
        return self._view
