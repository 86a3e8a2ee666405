"""What a host lends of its idle KV memory, and what of that its guest may keep.

    free ── idle, or calm for a while ──> lent     only what lies above the reserve
    lent ── the reserve is half eaten, or requests will eat it ──> free     until it is whole

The reserve is counted in blocks that hold no cached prefix. The host forgets none in order to lend
but those that nobody asked for in a long time, and serves what comes from its reserve while lent
granules return.
"""

import math
from dataclasses import dataclass
from typing import Final

from executor.granules import Granules
from executor.sections import GuestState, HostState

LEAST_CAP: Final = 1
# What is taken back at once, as a share of all granules, so that a burst does not ask in crumbs.
_STRIDE: Final = 1 / 16


@dataclass(frozen=True, slots=True)
class LendingLimits:
    """`reserve`: share of the granules that is never lent. `calm_ns`: how long a host under load
    must not have taken anything back before it lends more. `cold_ns`: how long nobody must have
    asked for a cached prefix before it is forgotten, so that its memory can be lent."""

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
    """KV that no request uses: blocks with pages, `plain` or `cached` (a prefix), and granules lent
    that have no pages."""

    plain: int
    cached: int
    lent: int


class LendingCore:
    """Decides in granules: positive to lend more, negative to take back; the clock is handed in."""

    def __init__(self, granules: Granules, limits: LendingLimits) -> None:
        self._granules = granules
        self._limits = limits
        self.reserve = max(1, math.ceil(limits.reserve * granules.count))
        self._stride = max(1, round(granules.count * _STRIDE))
        self._needed_ns: int | None = None
        self._refilling = False

    def step(self, now_ns: int, free: KvFree, demand_blocks: int, *, idle: bool) -> int:
        """How many granules to lend or to take back now.

        `demand_blocks`: what unfinished requests will still allocate. `idle`: there are none.
        """
        a_granule = self._granules.granule_blocks
        whole = self.reserve * a_granule
        spare = free.plain - demand_blocks
        # What is asked for may come in parts, where memory is not back at once.
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
        """Whether more plain blocks would be lent: what prefixes are forgotten for."""
        if self.reserve >= self._granules.count:
            return False
        return free.cached > demand_blocks and (idle or self._calm(now_ns))

    def _calm(self, now_ns: int) -> bool:
        return self._needed_ns is None or now_ns - self._needed_ns >= self._limits.calm_ns

    def missing(self, free: KvFree) -> int:
        """Granules by which the reserve is eaten, prefixes counted as room: they can be evicted."""
        a_granule = self._granules.granule_blocks
        return max(0, self.reserve - (free.plain + free.cached) // a_granule)


def lent_bytes(host: HostState | None) -> int:
    """What a guest may have of its host's memory now: what is lent, less what its reserve lacks."""
    if host is None or host.granules_lent <= 0:
        return 0
    # What the reserve lacks the host will take next: it is not to be granted any more.
    missing = host.bytes_lent * host.reserve_missing // host.granules_lent
    return max(0, host.bytes_lent - missing)


def guest_granules(base_bytes: int, host: HostState | None, guest: GuestState | None) -> int:
    """The cap of a guest that has `base_bytes` of its own and what its host lends now.

    LEAST_CAP, for no guest gives back its last granule, where a section cannot be read.
    """
    if guest is None or guest.granule_bytes <= 0:
        return LEAST_CAP
    granules = (base_bytes + lent_bytes(host)) // guest.granule_bytes
    return max(LEAST_CAP, min(granules, guest.granules_total))


def owed_bytes(base_bytes: int, host: HostState | None, guest: GuestState | None) -> int:
    """KV bytes that such a guest still keeps of what the host took back."""
    if guest is None:
        return 0
    allowed = guest_granules(base_bytes, host, guest)
    return max(0, guest.granules_mapped - allowed) * guest.granule_bytes
