"""Leases of readers: what each still needs is not collected.

Any caller may take a lease, so there is a bound for each peer (an address) and one for all. Where a
bound is reached the lease that was renewed longest ago gives way: of the peer itself, or of the
peer that holds most. A reader renews every third of its lease, so a lease that a flood took comes
back, and no peer can take the place of another.
"""

from __future__ import annotations

from collections import OrderedDict
from math import isfinite

from weight_transfer.errors import LeaseError
from weight_transfer.format.messages import LONGEST_TTL_S, MOST_READER_CHARS
from weight_transfer.store.catalog import ReaderPin

MOST_READERS = 4_096
MOST_OF_A_PEER = 256
_SWEEP_EVERY_S = 1.0
OWN = ""
"""The publisher itself: nobody takes from it."""


class ReadLeases:
    """By reader; each is at a version and may ask for anything after it. The clock is handed in.

    began_s: when the publisher began. It knows nothing of the leases of its earlier life, which
    their readers renew within LONGEST_TTL_S.
    """

    def __init__(self, began_s: float) -> None:
        self._by_peer: dict[str, OrderedDict[str, ReaderPin]] = {}
        self._settled_s = began_s + LONGEST_TTL_S
        self._swept_s = began_s

    def settled(self, now_s: float) -> bool:
        """Return True once every lease of an earlier process was renewed or has expired."""
        return now_s >= self._settled_s

    def take(
        self, reader: str, version: int, ttl_s: float, now_s: float, peer: str = OWN
    ) -> ReaderPin:
        """Take or renew; a reader of a peer has one lease. Raises LeaseError."""
        named = 0 < len(reader) <= MOST_READER_CHARS
        if not named or version < 0 or not isfinite(ttl_s) or ttl_s <= 0:
            raise LeaseError("a lease needs a reader, a version and a ttl_s above 0")
        if peer != OWN and reader not in self._by_peer.get(peer, ()):
            self._make_room(peer, now_s)
        held = self._by_peer.setdefault(peer, OrderedDict())
        lease = ReaderPin(reader, version, now_s + min(ttl_s, LONGEST_TTL_S))
        held[reader] = lease
        held.move_to_end(reader)
        return lease

    def live(self, now_s: float) -> list[ReaderPin]:
        """Return the leases that have not expired."""
        for peer, held in list(self._by_peer.items()):
            for reader in [r for r, each in held.items() if each.expires_s <= now_s]:
                del held[reader]
            if not held:
                del self._by_peer[peer]
        return [lease for held in self._by_peer.values() for lease in held.values()]

    def _make_room(self, peer: str, now_s: float) -> None:
        if len(self._by_peer.get(peer, ())) >= MOST_OF_A_PEER:
            self._by_peer[peer].popitem(last=False)
        elif self._others() >= MOST_READERS:
            if now_s >= self._swept_s + _SWEEP_EVERY_S:
                self._swept_s = now_s
                self.live(now_s)
            if self._others() >= MOST_READERS:
                peers = (name for name in self._by_peer if name != OWN)
                most = max(peers, key=lambda name: len(self._by_peer[name]))
                self._by_peer[most].popitem(last=False)

    def _others(self) -> int:
        return sum(len(held) for peer, held in self._by_peer.items() if peer != OWN)
