"""Lending of a host's idle KV memory, and the cap of a guest's while the host fills its own.

    free ── idle, or calm for a while ──> lent     only memory above the reserve
    lent ── the reserve is half used, or requests will use it ──> free     until it is whole

The reserve is counted in blocks without a cached prefix. To lend, the host evicts only cached
prefixes that had no hit for `cold_ns`. New requests are served from the reserve while lent granules
return.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from executor.control_page.seqlock_records import GuestState, HostState
from executor.kv.shrink_plan import NO_CAP, Granules
from slo import LoadForecast

LEAST_CAP: Final = 1
# Share of all granules that is taken back at once, so that a burst asks for few large parts.
_STRIDE: Final = 1 / 16
# The cap grows unless more than one in five of the last minute's seconds would be too much: if
# bursts are rarer, it costs less to shrink again than to stay small between them.
GROWTH_QUANTILE: Final = 0.8
_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class LendingLimits:
    """Limits of a lending host; ValueError for invalid ones.

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


class KvFree(NamedTuple):
    """KV memory of a host that no request uses: `plain` and `cached` blocks, `lent` granules.

    Plain blocks hold nothing, cached ones a prefix; lent granules have no pages.
    """

    plain: int
    cached: int
    lent: int


class LendingCore:
    """Decision of a host: how many granules (runs of KV blocks) to lend or to take back.

    The clock is passed in.
    """

    def __init__(self, granules: Granules, limits: LendingLimits) -> None:
        self.count = granules.count
        self._granule_blocks = granules.granule_blocks
        self._limits = limits
        self.reserve = max(1, math.ceil(limits.reserve * self.count))
        self._stride = max(1, round(self.count * _STRIDE))
        self._needed_ns: int | None = None
        self._refilling = False

    def step(self, now_ns: int, free: KvFree, demand_blocks: int, *, idle: bool) -> int:
        """Return how many granules to lend (positive) or to take back (negative) now.

        demand_blocks: blocks that unfinished requests will still allocate. idle: there are no
        requests.
        """
        a_granule = self._granule_blocks
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
        """Return True if cached prefixes may be dropped now, so that their blocks can be lent.

        Never without lendable granules; under load only if nothing was taken back for `calm_ns`.
        """
        if self.reserve >= self.count:
            return False
        return free.cached > demand_blocks and (idle or self._calm(now_ns))

    def _calm(self, now_ns: int) -> bool:
        return self._needed_ns is None or now_ns - self._needed_ns >= self._limits.calm_ns

    def missing(self, free: KvFree) -> int:
        """Return how many granules free and cached blocks fall short of the reserve; 0 for none."""
        return max(0, self.reserve - (free.plain + free.cached) // self._granule_blocks)


def lent_bytes(host: HostState | None, headroom: float = 0.0) -> int:
    """Return the bytes of its host's memory that a guest may have: the loan less missing reserve.

    headroom: share of the host's KV memory that stays neither used nor lent. 0 for an unknown host.
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
    """Return the most granules for a guest with `base_bytes` of its own and the present loan.

    LEAST_CAP for an unreadable guest section, as no guest gives back its last granule.
    """
    if guest is None or guest.granule_bytes <= 0:
        return LEAST_CAP
    granules = (base_bytes + lent_bytes(host, headroom)) // guest.granule_bytes
    return max(LEAST_CAP, min(granules, guest.granules_total))


def owed_bytes(base_bytes: int, host: HostState | None, guest: GuestState | None) -> int:
    """Return the KV bytes that a guest keeps beyond `base_bytes` and the loan; 0 for none."""
    if guest is None:
        return 0
    allowed = guest_granules(base_bytes, host, guest)
    return max(0, guest.granules_mapped - allowed) * guest.granule_bytes


class PressurePolicy(StrEnum):
    """Rule by which a guest's KV cap changes while the host fills its own KV memory.

        paper      above the high watermark: halve once; grow again with the next policy version
        adaptive   above it: halve, and again while it lasts; below the low one, unless the forecast
                   goes beyond: grow by an eighth of the whole a second

    Both halve at once. `paper` is ROSE as published (it aborts requests that no longer fit, and
    they continue elsewhere, as with the guest's balloon): without a new version a small guest stays
    small.
    """

    PAPER = "paper"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class PressureLimits:
    """Watermarks of the host's KV usage: pressure begins at `high` and ends below `low`.

    Both are shares in 0..1. `shrink_ns`: time between two halvings. `grow_ns`: time between two
    steps of growth, each `1 / grow_steps` of the guest's most. Raises ValueError for invalid
    limits.
    """

    policy: PressurePolicy = PressurePolicy.ADAPTIVE
    high: float = 0.90
    low: float = 0.80
    shrink_ns: int = 200_000_000
    grow_ns: int = 1_000_000_000
    grow_steps: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(
                f"KV watermarks are {self.low}, {self.high}; give 0 < low <= high <= 1"
            )
        if self.shrink_ns <= 0 or self.grow_ns <= 0 or self.grow_steps <= 0:
            raise ValueError("shrink_ns, grow_ns and grow_steps must be positive")


class PressureCore:
    """Calculator of one guest's KV cap from its host's KV usage; call `step` at every tick."""

    def __init__(self, limits: PressureLimits, cap: int = NO_CAP) -> None:
        """Start without pressure.

        cap: the cap that an earlier daemon left on the page, so that a restart lends nothing more.
        """
        self._limits = limits
        self._cap = cap
        self._pressed = False
        self._moved_ns: int | None = None
        self._version: int | None = None
        self._forecast = LoadForecast(slice_s=limits.grow_ns / _NS)
        self._last_ns: int | None = None

    def bound(self, high: float, low: float) -> None:
        """Use these watermarks from now on."""
        if (high, low) != (self._limits.high, self._limits.low):
            self._limits = replace(self._limits, high=high, low=low)

    @property
    def pressed(self) -> bool:
        """True from the usage's rise to the high watermark until it falls below the low one."""
        return self._pressed

    def step(
        self, now_ns: int, used: float | None, most: int, holds: int, policy_version: int
    ) -> int:
        """Return the cap in granules, NO_CAP while none is needed; never below 1 otherwise.

        `used`: share of the host's KV memory in use, None when unknown (nothing changes then).
        `most`: granules that the guest may have at most, 0 while unknown; `holds`: those it has.
        """
        if used is None or most <= 0:
            return self._cap
        began = self._watch(now_ns, used)
        if self._pressed:
            self._shrink(now_ns, most, holds, began=began)
        elif self._cap != NO_CAP:
            self._grow(now_ns, used, most, policy_version)
        self._version = policy_version if self._cap != NO_CAP else None
        return self._cap

    def _watch(self, now_ns: int, used: float) -> bool:
        """Update forecast and pressure with the present usage; return True if pressure begins."""
        if self._last_ns is not None and now_ns > self._last_ns:
            # Share times seconds, so that the forecast's load a second is the share.
            self._forecast.add(now_ns / _NS, used * (now_ns - self._last_ns) / _NS)
        self._last_ns = now_ns
        before = self._pressed
        self._pressed = used >= (self._limits.low if before else self._limits.high)
        return self._pressed and not before

    def _shrink(self, now_ns: int, most: int, holds: int, *, began: bool) -> None:
        again = self._limits.policy is PressurePolicy.ADAPTIVE and self._due(
            now_ns, self._limits.shrink_ns
        )
        if began or again:
            # Halve the held granules: halving a cap that was never filled would return nothing.
            now = min(size for size in (self._cap, holds, most) if size > 0)
            self._cap = max(1, now // 2)
            self._moved_ns = now_ns

    def _grow(self, now_ns: int, used: float, most: int, policy_version: int) -> None:
        if self._limits.policy is PressurePolicy.PAPER:
            if self._version not in (None, policy_version):
                self._cap = NO_CAP
            return
        if used >= self._limits.low or not self._due(now_ns, self._limits.grow_ns):
            return
        now_s, ahead_s = now_ns / _NS, self._limits.grow_ns / _NS
        if self._forecast.peak(now_s, ahead_s, GROWTH_QUANTILE) < self._limits.high:
            self._cap += max(1, most // self._limits.grow_steps)
            self._moved_ns = now_ns
            if self._cap >= most:
                self._cap = NO_CAP

    def _due(self, now_ns: int, after_ns: int) -> bool:
        return self._moved_ns is None or now_ns - self._moved_ns >= after_ns
