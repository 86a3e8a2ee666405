"""Lending of a host's idle KV memory: how much it lends, and what a guest may have of that.

    free ── idle, or calm for a while ──> lent     only memory above the reserve
    lent ── the reserve is half used, or requests will use it ──> free     until it is whole

The reserve is counted in blocks without a cached prefix. To lend, the host evicts only cached
prefixes that had no hit for `cold_ns`. New requests are served from the reserve while lent granules
return.
"""

import math
from dataclasses import dataclass
from typing import Final

from executor.control_page.seqlock_records import GuestState, HostState
from executor.kv.shrink_plan import Granules

LEAST_CAP: Final = 1
# Share of all granules that is taken back at once, so that a burst asks for few large parts.
_STRIDE: Final = 1 / 16


@dataclass(frozen=True, slots=True)
class LendingLimits:
    """Limits of a lending host.

    reserve: share of the granules that is never lent. calm_ns: a host under load lends more only if
    it took nothing back for this long. cold_ns: a cached prefix without a hit for this long may be
    dropped, so that its memory can be lent.
    """

    reserve: float = 0.2
    calm_ns: int = 1_000_000_000
    cold_ns: int = 300_000_000_000

    def __post_init__(self) -> None:
        if not 0.0 < self.reserve <= 1.0:
            raise ValueError(f"reserve is {self.reserve}; give a share above 0 and up to 1")
        if self.cold_ns < 0:
            raise ValueError("cold_ns must not be negative")


@dataclass(frozen=True, slots=True)
class KvFree:
    """KV memory that no request uses.

    Blocks with pages are `plain` or `cached` (a prefix); lent granules have no pages.
    """

    plain: int
    cached: int
    lent: int


class LendingCore:
    """Decides in granules: positive to lend more, negative to take back; the clock is passed in."""

    def __init__(self, granules: Granules, limits: LendingLimits) -> None:
        self._granules = granules
        self._limits = limits
        self.reserve = max(1, math.ceil(limits.reserve * granules.count))
        self._stride = max(1, round(granules.count * _STRIDE))
        self._needed_ns: int | None = None
        self._refilling = False

    def step(self, now_ns: int, free: KvFree, demand_blocks: int, *, idle: bool) -> int:
        """Return how many granules to lend (positive) or to take back (negative) now.

        demand_blocks: blocks that unfinished requests will still allocate. idle: there are none.
        """
        a_granule = self._granules.granule_blocks
        whole = self.reserve * a_granule
        spare = free.plain - demand_blocks
        # Granules may come back in parts, if memory is not back at once.
        eaten = 2 * spare < whole or (self._refilling and spare < whole)
        self._refilling = eaten and free.lent > 0
        if self._refilling:
            self._needed_ns = now_ns
            return -min(free.lent, max(self._stride, -(-(whole - spare) // a_granule)))
        if idle:
            return max(0, (spare - whole) // a_granule)
        if not self._calm(now_ns):
            return 0
        return max(0, (spare - whole) // a_granule - self._stride)

    def wants(self, now_ns: int, free: KvFree, demand_blocks: int, *, idle: bool) -> bool:
        """Return True if more plain blocks would be lent, for which prefixes are dropped."""
        if self.reserve >= self._granules.count:
            return False
        return free.cached > demand_blocks and (idle or self._calm(now_ns))

    def _calm(self, now_ns: int) -> bool:
        return self._needed_ns is None or now_ns - self._needed_ns >= self._limits.calm_ns

    def missing(self, free: KvFree) -> int:
        """Return the used granules of the reserve; prefixes count as room: they can be evicted."""
        a_granule = self._granules.granule_blocks
        return max(0, self.reserve - (free.plain + free.cached) // a_granule)


def lent_bytes(host: HostState | None, headroom: float = 0.0) -> int:
    """Return the memory of its host that a guest may have now: the loan, less the reserve's lack.

    headroom: share of the host's KV memory that stays neither used nor lent.
    """
    if host is None or host.granules_lent <= 0:
        return 0
    # The host will take next what its reserve lacks: it is not to be granted any more.
    missing = host.bytes_lent * host.reserve_missing // host.granules_lent
    lent = max(0, host.bytes_lent - missing)
    if headroom <= 0 or host.kv_total <= 0:
        return lent
    whole = host.bytes_lent * host.granules_total // host.granules_lent
    return min(lent, max(0, int(whole * (1 - host.kv_used / host.kv_total - headroom))))


def guest_granules(
    base_bytes: int, host: HostState | None, guest: GuestState | None, headroom: float = 0.0
) -> int:
    """Return the cap of a guest with `base_bytes` of its own and the host's present loan.

    LEAST_CAP for an unreadable section, as no guest gives back its last granule.
    """
    if guest is None or guest.granule_bytes <= 0:
        return LEAST_CAP
    granules = (base_bytes + lent_bytes(host, headroom)) // guest.granule_bytes
    return max(LEAST_CAP, min(granules, guest.granules_total))


def owed_bytes(base_bytes: int, host: HostState | None, guest: GuestState | None) -> int:
    """Return the KV bytes that such a guest still keeps of the memory that the host took back."""
    if guest is None:
        return 0
    allowed = guest_granules(base_bytes, host, guest)
    return max(0, guest.granules_mapped - allowed) * guest.granule_bytes
