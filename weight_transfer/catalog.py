"""Catalog of published versions: ways to them, their readers' leases, files to collect. No IO.

    base 0 ──δ1──► 1 ──δ2──► 2 ─ … ─► 16 (= base 16) ──δ17──► 17
A joiner takes a base and the deltas after it; whoever lags takes the deltas, or a base where that
is fewer bytes.

What a reader with a lease still needs is not collected. Any caller may take a lease, so there is a
bound for each peer (an address) and one for all. Where a bound is reached the lease that was
renewed longest ago gives way: of the peer itself, or of the peer that holds most. A reader renews
every third of its lease, so a lease that a flood took comes back, and no peer can take the place of
another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Final

from weight_transfer.errors import CatalogError, ReadLeaseError

MOST_DELTAS = 16
LONGEST_TTL_S: Final = 120.0
MOST_READER_CHARS: Final = 512
MOST_SHARE = 0.3
MOST_LEASED = 64
"""Most deltas that leases keep, the newest: a reader further behind is better off with a base, and
no reader can make a publisher keep everything."""
MOST_READERS = 4_096
MOST_OF_A_PEER = 256
_SWEEP_EVERY_S = 1.0
OWN = ""
"""Peer name of the publisher's own leases; they count towards no limit."""


@dataclass(frozen=True, slots=True)
class Published:
    """A published delta: its version, the parent it builds on, and its encoded bytes."""

    version: int
    parent: int
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Plan to reach a version: load `base`, then apply `deltas` in order.

    `base` None: continue from the held version. `wire_bytes`: encoded bytes of all steps.
    """

    base: int | None
    deltas: tuple[int, ...]
    wire_bytes: int

    @property
    def steps(self) -> tuple[tuple[int, bool], ...]:
        """(version, True for a base or False for a delta) of each step, in order."""
        base = () if self.base is None else ((self.base, True),)
        return (*base, *((version, False) for version in self.deltas))


@dataclass(frozen=True, slots=True)
class ReaderPin:
    """Lease of a reader that holds `version`: until `expires_s` nothing after it is deleted."""

    reader: str
    version: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class Catalog:
    """Published bases (encoded bytes by version) and deltas (one at most for each version)."""

    bases: Mapping[int, int] = field(default_factory=dict)
    deltas: tuple[Published, ...] = ()

    def __post_init__(self) -> None:
        if len({delta.version for delta in self.deltas}) != len(self.deltas):
            raise CatalogError("a version has two deltas; publish each version once")
        for delta in self.deltas:
            if delta.version <= delta.parent:
                raise CatalogError(f"version {delta.version} does not follow {delta.parent}")

    @property
    def newest(self) -> int | None:
        """Newest version that a base and deltas lead to; None if there is none."""
        return max(self._cheapest(None), default=None)

    @property
    def _greatest(self) -> int | None:
        """Greatest published version number, reachable from a base or not; None without any."""
        return max((*self.bases, *(delta.version for delta in self.deltas)), default=None)

    def plan(self, held: int | None, target: int) -> FetchPlan:
        """Return the plan with the fewest wire bytes from version `held` to `target`.

        `held` None: nothing is held. Of equal bytes the plan without a base is returned. Raises
        CatalogError when no base and no deltas lead there.
        """
        ways = self._cheapest(held)
        if target not in ways:
            raise CatalogError(
                f"version {target} cannot be reached from {held}; publish a base of it or after it"
            )
        way, version, deltas = ways[target], target, []
        while way.before is not None:
            deltas.append(version)
            version = way.before
            way = ways[version]
        base = version if way.from_base else None
        return FetchPlan(base, tuple(reversed(deltas)), ways[target].wire_bytes)

    def _cheapest(self, held: int | None) -> dict[int, _Way]:
        """Return the last step of the plan with the fewest bytes, by version that can be
        reached."""
        best = {version: _Way(size, True) for version, size in self.bases.items()}
        if held is not None:
            best[held] = _Way(0, False)
        for delta in sorted(self.deltas, key=lambda delta: delta.version):
            before = best.get(delta.parent)
            if before is None:
                continue
            size = before.wire_bytes + delta.wire_bytes
            way = _Way(size, before.from_base, before.steps + 1, delta.parent)
            known = best.get(delta.version)
            if known is None or way.worth < known.worth:
                best[delta.version] = way
        return best

    def base_due(self) -> bool:
        """Return True if a new base of the newest version should be published for joining readers.

        A base is due when none leads to the newest version, when more than MOST_DELTAS deltas
        follow the base, or when these deltas have more than MOST_SHARE of the base's bytes. False
        for an empty catalog.
        """
        newest = self.newest
        if newest is None or newest != self._greatest:
            return self._greatest is not None
        plan = self.plan(None, newest)
        assert plan.base is not None
        size = self.bases[plan.base]
        return len(plan.deltas) > MOST_DELTAS or plan.wire_bytes - size > MOST_SHARE * size

    def needed(self, leases: Iterable[ReaderPin], now_s: float) -> Needed:
        """Return the versions whose bases and deltas must not be deleted at `now_s`.

        They are those on the cheapest way to the newest version for a joining reader, and
        everything after the oldest version that a live lease holds, but at most the newest
        MOST_LEASED deltas. All is needed while no base leads to the newest version.
        """
        newest = self.newest
        # Without a base that leads to the newest a joiner begins with the first delta.
        if newest is None or newest != self._greatest:
            return Needed(frozenset(self.bases), frozenset(d.version for d in self.deltas))
        joiner = self.plan(None, newest)
        bases = {joiner.base} if joiner.base is not None else set()
        deltas = set(joiner.deltas)
        held = min((lease.version for lease in leases if lease.expires_s > now_s), default=None)
        if held is not None:
            newer = sorted(d.version for d in self.deltas if d.version > held)[-MOST_LEASED:]
            oldest = held if len(newer) < MOST_LEASED else max(held, newer[0] - 1)
            bases |= {version for version in self.bases if version >= oldest}
            deltas |= set(newer)
        return Needed(frozenset(bases), frozenset(deltas))


@dataclass(frozen=True, slots=True)
class Needed:
    """Versions whose base must not be deleted, and versions whose delta must not be deleted."""

    bases: frozenset[int]
    deltas: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Way:
    """Last step of the cheapest way to a version: a delta from `before`, None: a base or held
    version."""

    wire_bytes: int
    from_base: bool
    steps: int = 0
    before: int | None = None

    @property
    def worth(self) -> tuple[int, bool, int]:
        """Sort key of ways: fewer wire bytes, then without a base, then fewer deltas."""
        return self.wire_bytes, self.from_base, self.steps


class ReadLeases:
    """Read leases, by peer address and reader name, at a publisher; the clock is handed in.

    began_s: start of the publisher. Leases of its earlier process are unknown; their readers renew
    them within LONGEST_TTL_S.
    """

    def __init__(self, began_s: float) -> None:
        self._by_peer: dict[str, OrderedDict[str, ReaderPin]] = {}
        self._settled_s = began_s + LONGEST_TTL_S
        self._swept_s = began_s

    def settled(self, now_s: float) -> bool:
        """Return True once LONGEST_TTL_S has passed since the start, so that no older lease is
        unknown."""
        return now_s >= self._settled_s

    def take(
        self, reader: str, version: int, ttl_s: float, now_s: float, peer: str = OWN
    ) -> ReaderPin:
        """Take or renew the lease of a peer's reader and return it; it lasts LONGEST_TTL_S at most.

        At a peer's limit of readers, its lease that was renewed longest ago is dropped; at the
        limit of all peers, that of the peer with the most leases. Raises ReadLeaseError for an
        empty or long name, a negative version, or a `ttl_s` that is not above 0.
        """
        named = 0 < len(reader) <= MOST_READER_CHARS
        if not named or version < 0 or not isfinite(ttl_s) or ttl_s <= 0:
            raise ReadLeaseError("a lease needs a reader, a version and a ttl_s above 0")
        if peer != OWN and reader not in self._by_peer.get(peer, ()):
            self._make_room(peer, now_s)
        held = self._by_peer.setdefault(peer, OrderedDict())
        lease = ReaderPin(reader, version, now_s + min(ttl_s, LONGEST_TTL_S))
        held[reader] = lease
        held.move_to_end(reader)
        return lease

    def live(self, now_s: float) -> list[ReaderPin]:
        """Return the leases that have not expired, and remove the expired ones."""
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
