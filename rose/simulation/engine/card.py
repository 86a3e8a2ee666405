"""Stand-in for the card (or the cards of one tensor parallel group) that host and guest share.

One step alone has the whole card. Two steps at once, of host and guest, share it: the host's goes
on at `host_share` of its speed, the guest's at the rest, as time slices of two processes do. No
step is ever stopped in the middle.
"""

from rose.simulation.clock.event_queue import NS, Call, Entry, EventQueue

HOST, GUEST = 0, 1


class ModelledCard:
    """Runs at most one step of each tenant; busy time is what passes while a step is in it."""

    def __init__(self, queue: EventQueue, host_share: float = 0.5) -> None:
        self._queue = queue
        self._speed = (host_share, 1.0 - host_share)
        self._left_ns = [0.0, 0.0]
        self._since_ns = [0, 0]
        self._done: list[Call | None] = [None, None]
        self._entries: list[Entry | None] = [None, None]
        self._began_ns = [0, 0]
        self.busy_ns = [0, 0]
        # Busy time of either tenant: two steps at once are one busy card.
        self._any_ns = self._any_since_ns = 0

    def busy(self, tenant: int) -> bool:
        """Return True if a step of the tenant runs on it."""
        return self._done[tenant] is not None

    def begin(self, tenant: int, seconds: float, done: Call) -> None:
        """Begin a step that takes so long alone; `done` is called at its end."""
        assert self._done[tenant] is None, "a tenant has one step at a time"
        now_ns = self._queue.now_ns
        if self._done[1 - tenant] is None:
            self._any_since_ns = now_ns
        self._done[tenant] = done
        self._left_ns[tenant] = seconds * NS
        self._since_ns[tenant] = self._began_ns[tenant] = now_ns
        other = 1 - tenant
        if self._done[other] is not None:
            self._progress(other, 1.0)
            self._plan(other, self._speed[other])
            self._plan(tenant, self._speed[tenant])
        else:
            self._plan(tenant, 1.0)

    def shorten(self, tenant: int, end_ns: int) -> None:
        """Let the tenant's work, which has the card alone, end sooner than was said."""
        assert self._done[1 - tenant] is None, "the other tenant has a part of the card"
        now_ns = self._queue.now_ns
        self._left_ns[tenant] = float(end_ns - now_ns)
        self._since_ns[tenant] = now_ns
        self._plan(tenant, 1.0)

    def busy_until_now_ns(self, tenant: int) -> int:
        """Busy time, with that of the step that runs."""
        running_ns = self._queue.now_ns - self._began_ns[tenant] if self.busy(tenant) else 0
        return self.busy_ns[tenant] + running_ns

    def any_busy_ns(self) -> int:
        """Time in which it was busy with a step of either tenant, until now."""
        running = self.busy(HOST) or self.busy(GUEST)
        return self._any_ns + (self._queue.now_ns - self._any_since_ns if running else 0)

    def _progress(self, tenant: int, speed: float) -> None:
        now_ns = self._queue.now_ns
        self._left_ns[tenant] -= (now_ns - self._since_ns[tenant]) * speed
        self._since_ns[tenant] = now_ns

    def _plan(self, tenant: int, speed: float) -> None:
        entry = self._entries[tenant]
        if entry is not None:
            entry.cancel()
        left_ns = self._left_ns[tenant]
        takes_ns = round(left_ns / speed) if left_ns > 0 else 0
        ended = self._host_ended if tenant == HOST else self._guest_ended
        self._entries[tenant] = self._queue.at_ns(self._queue.now_ns + takes_ns, ended)

    def _host_ended(self) -> None:
        self._ended(HOST)

    def _guest_ended(self) -> None:
        self._ended(GUEST)

    def _ended(self, tenant: int) -> None:
        done, self._done[tenant], self._entries[tenant] = self._done[tenant], None, None
        self.busy_ns[tenant] += self._queue.now_ns - self._began_ns[tenant]
        other = 1 - tenant
        if self._done[other] is not None:
            self._progress(other, self._speed[other])
            self._plan(other, 1.0)
        else:
            self._any_ns += self._queue.now_ns - self._any_since_ns
        assert done is not None
        done()
