"""Caps of capacity policies on one guest, beneath the limits of its node's own file.

They arrive over the network and may change at any time; a missing one bounds nothing. The stricter
of cap and file holds.
"""

import math
from dataclasses import dataclass
from typing import Final

from executor.kv.capacity_policy import LEAST_CAP, NO_CAP, PressureLimits

# In each such window a guest may begin steps for its share of it.
COMPUTE_WINDOW_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HarvestCaps:
    """Caps of a guest; None bounds nothing.

    compute: share of each second in which it may begin steps; one that has begun ends, so a guest's
    steps may take longer by one step a second. kv_bytes: KV memory that it may keep. kv_headroom:
    share of the host's KV memory that is neither used nor lent, for a guest that borrows. Raises
    ValueError for invalid shares.
    """

    compute: float | None = None
    kv_bytes: int | None = None
    kv_headroom: float = 0.0
    slack_share: float | None = None
    high_watermark: float | None = None
    low_watermark: float | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "kv_headroom", "slack_share", "high_watermark", "low_watermark"):
            share = getattr(self, name)
            if share is not None and not (math.isfinite(share) and 0.0 <= share <= 1.0):
                raise ValueError(f"{name} is {share}; give a share in 0..1")
        if self.kv_bytes is not None and self.kv_bytes < 0:
            raise ValueError(f"kv_bytes is {self.kv_bytes}; give 0 or more")

    def computes(self, now_ns: int) -> bool:
        """Return True if a guest may begin steps at this moment."""
        if self.compute is None:
            return True
        return now_ns % COMPUTE_WINDOW_NS < self.compute * COMPUTE_WINDOW_NS

    def slack(self, own: float) -> float:
        """Return the share of the host's slack; `own` is that of the node's file."""
        return own if self.slack_share is None else min(own, self.slack_share)

    def granules(self, granule_bytes: int) -> int:
        """Return the KV granules that it may keep; NO_CAP for any number."""
        if self.kv_bytes is None:
            return NO_CAP
        # A guest that does not report the size of its granules gets none beyond the last.
        return max(LEAST_CAP, self.kv_bytes // granule_bytes) if granule_bytes > 0 else LEAST_CAP

    def pressure(self, own: PressureLimits) -> tuple[float, float]:
        """Return the high and low watermark; `own` are those of the node's file."""
        high = own.high if self.high_watermark is None else min(own.high, self.high_watermark)
        low = own.low if self.low_watermark is None else min(own.low, self.low_watermark)
        return high, min(low, high)


UNCAPPED: Final = HarvestCaps()
