"""Leases: which readers may still ask for what a publisher would collect. Pure."""

from math import isfinite

from rose.errors import RefusedError
from weight_transfer.catalog import Lease

LONGEST_TTL_S = 120.0
MOST_READERS = 4_096


class Leases:
    """By reader; each is at a version and may ask for anything after it. The clock is handed in.

    began_s: when the publisher began. It knows nothing of the leases of its earlier life, which
    their readers renew within LONGEST_TTL_S.
    """

    def __init__(self, began_s: float) -> None:
        self._by_reader: dict[str, Lease] = {}
        self._settled_s = began_s + LONGEST_TTL_S

    def settled(self, now_s: float) -> bool:
        """Whether every lease of an earlier life was renewed or is over."""
        return now_s >= self._settled_s

    def take(self, reader: str, version: int, ttl_s: float, now_s: float) -> Lease:
        """Take or renew; a reader has one lease. Raises RefusedError."""
        if not reader or version < 0 or not isfinite(ttl_s) or ttl_s <= 0:
            raise RefusedError("a lease needs a reader, a version and a ttl_s above 0")
        self.live(now_s)
        if reader not in self._by_reader and len(self._by_reader) >= MOST_READERS:
            raise RefusedError(f"{MOST_READERS} readers hold leases already; wait for one to end")
        lease = Lease(reader, version, now_s + min(ttl_s, LONGEST_TTL_S))
        self._by_reader[reader] = lease
        return lease

    def live(self, now_s: float) -> list[Lease]:
        """Those that have not run out."""
        self._by_reader = {r: each for r, each in self._by_reader.items() if each.expires_s > now_s}
        return list(self._by_reader.values())
