"""Cap of a guest's KV memory while the host fills its own.

    paper      above the high watermark: halve once; grow again with the next policy version
    adaptive   above it: halve, and again while it lasts; below the low one, unless the forecast
               goes beyond: grow by an eighth of the whole a second

Both halve at once. `paper` is ROSE as published (it aborts requests that no longer fit, and they
continue elsewhere, as with the guest's balloon): without a new version a small guest stays small.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from executor.kv.shrink_plan import NO_CAP
from slo import LoadForecast

# The cap grows unless more than one in five of the last minute's seconds would be too much: if
# bursts are rarer, it costs less to shrink again than to stay small between them.
GROWTH_QUANTILE: Final = 0.8
_NS: Final = 1e9


class PressurePolicy(StrEnum):
    """Policies by their names in an operator's configuration."""

    PAPER = "paper"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class PressureLimits:
    """Shares of the host's KV memory in use: pressure begins at `high` and ends below `low`.

    `shrink_ns`: between two halvings. `grow_ns`: between two steps of growth, each `1 / grow_steps`
    of the guest's most. Raises ValueError for invalid limits.
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
    """The cap of one guest. Feed it every tick; it keeps no clock."""

    def __init__(self, limits: PressureLimits, cap: int = NO_CAP) -> None:
        """cap: the one that an earlier daemon left on the page; a restart lends nothing more."""
        self._limits = limits
        self._cap = cap
        self._pressed = False
        self._moved_ns: int | None = None
        self._version: int | None = None
        self._forecast = LoadForecast(slice_s=limits.grow_ns / _NS)
        self._last_ns: int | None = None

    def bound(self, high: float, low: float) -> None:
        """Use other watermarks from now on."""
        if (high, low) != (self._limits.high, self._limits.low):
            self._limits = replace(self._limits, high=high, low=low)

    @property
    def pressed(self) -> bool:
        """True while the host needs its KV memory."""
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
        """Return True if pressure begins just now."""
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
