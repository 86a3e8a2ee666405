"""Stand-ins for the card that host and guest share, and for the KV memory of an engine on it.

One step alone has the whole card (or the cards of one tensor parallel group). Two steps at once, of
host and guest, share it: the host's goes on at `host_share` of its speed, the guest's at the rest,
as time slices of two processes do. No step is ever stopped in the middle.

KV memory counts units of tokens, and keeps no addresses:

    free ── allocate ──> used by a sequence ── keep ──> cached under its session ── evict ──> free
                                                 └── the next turn of the session takes it back

A prefix that several sequences share (the prompt of a group) is held once: it is not evicted while
any of them runs. The least recently used cached prefix is evicted first, as in vLLM's block pool.
"""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from rose.simulation.clock import NS, Call, Entry, EventQueue

HOST, GUEST = 0, 1


class ModelledCard:
    """Model of a card that runs at most one step of each tenant; two steps at once share its speed.

    It counts busy time.
    """

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
        """Return True if a step of the tenant runs on the card."""
        return self._done[tenant] is not None

    def begin(self, tenant: int, seconds: float, done: Call) -> None:
        """Begin a tenant's step of `seconds` alone on the card; `done` is called at its end."""
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
        """End the step of a tenant that has the card alone at `end_ns`, sooner than planned."""
        assert self._done[1 - tenant] is None, "the other tenant has a part of the card"
        now_ns = self._queue.now_ns
        self._left_ns[tenant] = float(end_ns - now_ns)
        self._since_ns[tenant] = now_ns
        self._plan(tenant, 1.0)

    def busy_until_now_ns(self, tenant: int) -> int:
        """Return the nanoseconds in which the tenant had a step on the card, the running one
        included.
        """
        running_ns = self._queue.now_ns - self._began_ns[tenant] if self.busy(tenant) else 0
        return self.busy_ns[tenant] + running_ns

    def any_busy_ns(self) -> int:
        """Return the nanoseconds in which a step of either tenant was on the card, until now."""
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
        ended = partial(self._ended, tenant)
        self._entries[tenant] = self._queue.at_ns(self._queue.now_ns + takes_ns, ended)

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


@dataclass(slots=True)
class _Shared:
    units: int
    tokens: int
    users: int = 0
    filled: bool = False


class ModelledKv:
    """Model of one engine's KV memory: `units` of `unit_tokens` tokens each, used, cached or free.

    Its size may change.
    """

    def __init__(self, units: int, unit_tokens: int) -> None:
        self.units = units
        self.unit_tokens = unit_tokens
        self.used = 0
        self.cached = 0
        # Tokens and units of each session, least recently used first.
        self._sessions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._shared: OrderedDict[str, _Shared] = OrderedDict()

    @property
    def plain(self) -> int:
        """Number of units that neither a sequence nor a cached prefix has."""
        return self.units - self.used - self.cached

    def need(self, tokens: int) -> int:
        """Return the number of KV units that hold so many tokens, rounded up."""
        return -(-tokens // self.unit_tokens)

    def allocate(self, units: int) -> bool:
        """Take units for a sequence, and evict cached prefixes if too few are free; return False,
        without a change, if there are not enough.
        """
        if units > self.units - self.used:
            return False
        while units > self.plain and self._evict():
            pass
        self.used += units
        return True

    def free(self, units: int) -> None:
        """Return a sequence's units to the free ones."""
        self.used -= units

    def keep(self, session: str, tokens: int, units: int) -> None:
        """Move units of an ended sequence to the cache, as its session's prefix; an older prefix of
        the session is dropped.
        """
        self.used -= units
        old = self._sessions.pop(session, None)
        if old is not None:
            self.cached -= old[1]
        self._sessions[session] = (tokens, units)
        self.cached += units

    def resume(self, session: str) -> tuple[int, int]:
        """Take a session's prefix out of the cache; return its tokens and units, which now count as
        used. (0, 0) if there is none.
        """
        tokens, units = self._sessions.pop(session, (0, 0))
        self.cached -= units
        self.used += units
        return tokens, units

    def join(self, prefix: str, tokens: int) -> tuple[int, bool]:
        """Use a shared prefix: return its tokens that are computed already, and True if it is held
        for the caller.

        If it is new, units are taken for it, and the caller computes it and calls `fill`. (0,
        False) means that there is no room for it.
        """
        shared = self._shared.get(prefix)
        if shared is None:
            units = tokens // self.unit_tokens
            if units == 0 or not self.allocate(units):
                return 0, False
            shared = self._shared[prefix] = _Shared(units, units * self.unit_tokens)
        elif shared.users == 0:
            self.cached -= shared.units
            self.used += shared.units
        shared.users += 1
        self._shared.move_to_end(prefix)
        return (shared.tokens if shared.filled else 0), True

    def fill(self, prefix: str) -> None:
        """Mark a shared prefix as computed."""
        self._shared[prefix].filled = True

    def shared_units(self, prefix: str) -> int:
        """Return the number of units that a shared prefix has."""
        return self._shared[prefix].units

    def leave(self, prefix: str) -> None:
        """End one sequence's use of a shared prefix; after the last use it is cached, or dropped if
        it was never computed.
        """
        shared = self._shared[prefix]
        shared.users -= 1
        if shared.users == 0:
            self.used -= shared.units
            if shared.filled:
                self.cached += shared.units
            else:
                del self._shared[prefix]

    def resize(self, units: int) -> bool:
        """Change the number of units, and evict prefixes if needed; return False if sequences use
        more than that.
        """
        self.units = units
        while self.plain < 0 and self._evict():
            pass
        return self.plain >= 0

    def forget(self) -> None:
        """Drop all cached prefixes, since the weights changed; shared prefixes in use stay."""
        for prefix in [name for name, each in self._shared.items() if each.users == 0]:
            del self._shared[prefix]
        self._sessions.clear()
        self.cached = 0

    def forget_cold(self, units: int) -> None:
        """Evict cached prefixes, least recently used first, until `units` units are evicted or none
        is left.
        """
        before = self.cached
        while before - self.cached < units and self._evict():
            pass

    def _evict(self) -> bool:
        if self._sessions:
            _, (_, units) = self._sessions.popitem(last=False)
            self.cached -= units
            return True
        for prefix, shared in self._shared.items():
            if shared.users == 0:
                del self._shared[prefix]
                self.cached -= shared.units
                return True
        return False
