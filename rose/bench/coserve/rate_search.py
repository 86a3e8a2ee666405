"""Which arrival rate keeps a host busy for a given share of the time? Pure."""

import math
from dataclasses import dataclass, field

CLOSE_ENOUGH = 0.02
_EDGE = 0.01


@dataclass(slots=True)
class RateSearch:
    """Bisection, with each proposal from the busy time that the nearest try measured.

    If requests were served side by side the host would be idle with probability
    exp(-rate × request_s) (an M/G/∞ queue); batching only changes request_s.
    """

    target: float
    request_s: float
    tries: list[tuple[float, float]] = field(default_factory=list)

    @property
    def rate_per_s(self) -> float:
        """The rate to try next."""
        if not self.tries:
            return self._rate(self.request_s)
        rate, busy = self.nearest
        busy = min(1 - _EDGE, max(_EDGE, busy))
        proposed = self._rate(-math.log(1 - busy) / rate)
        low = max((r for r, b in self.tries if b <= self.target), default=0.0)
        high = min((r for r, b in self.tries if b > self.target), default=math.inf)
        if low < proposed < high:
            return proposed
        return math.sqrt(low * high) if 0 < low < high < math.inf else proposed

    @property
    def nearest(self) -> tuple[float, float]:
        """(rate, busy) of the try that came closest."""
        return min(self.tries, key=lambda tried: abs(tried[1] - self.target))

    @property
    def found(self) -> bool:
        """Whether the nearest try is near enough."""
        return bool(self.tries) and abs(self.nearest[1] - self.target) <= CLOSE_ENOUGH

    def measured(self, rate_per_s: float, busy: float) -> None:
        """A try's result."""
        self.tries.append((rate_per_s, busy))

    def _rate(self, request_s: float) -> float:
        return -math.log(1 - self.target) / request_s
