"""Stand-in for an engine's KV block pool: it counts units of tokens, and keeps no addresses.

    free ── allocate ──> used by a sequence ── keep ──> cached under its session ── evict ──> free
                                                 └── the next turn of the session takes it back

A prefix that several sequences share (the prompt of a group, a system prompt) is held once: it is
not evicted while any of them runs. Of what is cached the least recently used goes first, as in
vLLM's block pool.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Shared:
    units: int
    tokens: int
    users: int = 0
    filled: bool = False


class ModelledKv:
    """KV memory of one engine: `units` of `unit_tokens` each; capacity may change."""

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
        """Units that neither a sequence nor a cached prefix has."""
        return self.units - self.used - self.cached

    @property
    def evictable(self) -> int:
        """Units that hold prefixes which no running sequence uses."""
        return self.cached

    def need(self, tokens: int) -> int:
        """Units for so many tokens."""
        return -(-tokens // self.unit_tokens)

    def allocate(self, units: int) -> bool:
        """Take units, evicting prefixes where there are too few; False: there are not enough."""
        if units > self.units - self.used:
            return False
        while units > self.plain and self._evict():
            pass
        self.used += units
        return True

    def free(self, units: int) -> None:
        """Give units back."""
        self.used -= units

    def keep(self, session: str, tokens: int, units: int) -> None:
        """Units of a sequence that ended hold its session's prefix from now on."""
        self.used -= units
        old = self._sessions.pop(session, None)
        if old is not None:
            self.cached -= old[1]
        self._sessions[session] = (tokens, units)
        self.cached += units

    def resume(self, session: str) -> tuple[int, int]:
        """Take a session's prefix out of the cache: its tokens, and units that are used by now."""
        tokens, units = self._sessions.pop(session, (0, 0))
        self.cached -= units
        self.used += units
        return tokens, units

    def join(self, prefix: str, tokens: int) -> tuple[int, bool]:
        """Use a shared prefix: its tokens that are computed already, and whether it is held.

        Where it is not there yet, units are taken for it: who joined fills it (`fill`). Not held:
        there is no room for it.
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
        """The prefix is computed."""
        self._shared[prefix].filled = True

    def shared_units(self, prefix: str) -> int:
        """Units that the shared prefix has."""
        return self._shared[prefix].units

    def leave(self, prefix: str) -> None:
        """A sequence uses the shared prefix no more."""
        shared = self._shared[prefix]
        shared.users -= 1
        if shared.users == 0:
            self.used -= shared.units
            if shared.filled:
                self.cached += shared.units
            else:
                del self._shared[prefix]

    def resize(self, units: int) -> bool:
        """Have so many units in all; False: sequences use more, and prefixes are all gone."""
        self.units = units
        while self.plain < 0 and self._evict():
            pass
        return self.plain >= 0

    def forget(self) -> None:
        """Drop all prefixes that nobody uses: weights changed, and old KV belongs to no version."""
        for prefix in [name for name, each in self._shared.items() if each.users == 0]:
            del self._shared[prefix]
        self._sessions.clear()
        self.cached = 0

    def forget_cold(self, units: int) -> int:
        """Evict up to so many units of prefixes; units that are free by that."""
        before = self.cached
        while before - self.cached < units and self._evict():
            pass
        return before - self.cached

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
