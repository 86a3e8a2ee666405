"""What one request experienced, and exact percentiles of many."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from slo.spec import SloSpec


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """Measured times of a finished request; `tpot_s` is 0 with fewer than two tokens."""

    request_id: str
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int

    def meets(self, spec: SloSpec) -> bool:
        """Whether both targets hold for this request."""
        return self.ttft_s <= spec.ttft_s and self.tpot_s <= spec.tpot_s


def percentile(values: Iterable[float], fraction: float) -> float:
    """Nearest-rank percentile: the smallest value that `fraction` of `values` do not exceed.

    Raises ValueError without values or for a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; give one in (0, 1]")
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values: a percentile needs at least one")
    return ordered[math.ceil(fraction * len(ordered) - 1e-9) - 1]
