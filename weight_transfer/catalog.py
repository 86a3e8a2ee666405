"""What is published, the cheapest way to a version, and what nobody needs any more. Pure.

    base 0 ──δ1──► 1 ──δ2──► 2 ─ … ─► 16 (= base 16) ──δ17──► 17
A joiner takes a base and the deltas after it; whoever lags takes the deltas, or a base where that
is fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weight_transfer.errors import CatalogError

MOST_DELTAS = 16
MOST_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Published:
    """One delta: bytes that cross a link to come from `parent` to `version`."""

    version: int
    parent: int
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Load `base` (None: go on from what is held), then apply `deltas` in order."""

    base: int | None
    deltas: tuple[int, ...]
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A reader that has `version` and may still ask for anything after it, until `expires_s`."""

    reader: str
    version: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class Catalog:
    """`bases`: bytes by version. `deltas`: each version has one at most."""

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
        """The newest version that can be reached, None without any."""
        known = {*self.bases, *(delta.version for delta in self.deltas)}
        return max((v for v in known if self._cheapest(None).get(v) is not None), default=None)

    def plan(self, held: int | None, target: int) -> Plan:
        """The fewest bytes from what is held (None: nothing) to `target`.

        Raises CatalogError when no base and no delta lead there. Of equal bytes the way without a
        base is taken: it keeps what is there.
        """
        found = self._cheapest(held).get(target)
        if found is None:
            raise CatalogError(
                f"version {target} cannot be reached from {held}; publish a base of it or after it"
            )
        return found

    def _cheapest(self, held: int | None) -> dict[int, Plan]:
        best = {version: Plan(version, (), size) for version, size in self.bases.items()}
        if held is not None:
            best[held] = Plan(None, (), 0)
        for delta in sorted(self.deltas, key=lambda delta: delta.version):
            before = best.get(delta.parent)
            if before is None:
                continue
            way = Plan(
                before.base,
                (*before.deltas, delta.version),
                before.wire_bytes + delta.wire_bytes,
            )
            known = best.get(delta.version)
            if known is None or _worth(way) < _worth(known):
                best[delta.version] = way
        return best

    def base_due(self) -> bool:
        """Whether the newest version deserves a base of its own: to join takes too much without.

        Longer than MOST_DELTAS, or deltas of more than MOST_SHARE of the base before them.
        """
        newest = self.newest
        if newest is None:
            return False
        plan = self.plan(None, newest)
        assert plan.base is not None
        size = self.bases[plan.base]
        return len(plan.deltas) > MOST_DELTAS or plan.wire_bytes - size > MOST_SHARE * size

    def needed(self, leases: Iterable[Lease], now_s: float) -> Needed:
        """What must stay: the way to the newest version for a joiner and for every leased reader.

        Also of a reader whose way is a base now: its chain stays while its lease lives, since it
        may be in the middle of it.
        """
        newest = self.newest
        if newest is None:  # Without a base a joiner begins with the first delta.
            return Needed(frozenset(self.bases), frozenset(d.version for d in self.deltas))
        joiner = self.plan(None, newest)
        bases = {joiner.base} if joiner.base is not None else set()
        deltas = set(joiner.deltas)
        for lease in leases:
            if lease.expires_s > now_s:
                bases |= {version for version in self.bases if version >= lease.version}
                deltas |= {d.version for d in self.deltas if d.version > lease.version}
        return Needed(frozenset(bases), frozenset(deltas))


@dataclass(frozen=True, slots=True)
class Needed:
    """Versions whose base, and whose delta, must not be deleted."""

    bases: frozenset[int]
    deltas: frozenset[int]


def _worth(plan: Plan) -> tuple[int, bool, int]:
    return plan.wire_bytes, plan.base is not None, len(plan.deltas)
