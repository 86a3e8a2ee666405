"""Load forecast of a host, for provisioning: level, damped trend, and room for bursts."""

import math
from collections import deque
from typing import Final

from slo.histogram import percentile

ALPHA: Final = 0.3
BETA: Final = 0.1
PHI: Final = 0.9


class LoadForecast:
    """Forecast of a load: Holt's linear smoothing with a damped trend, and room for bursts.

    level' = α y + (1−α)(level + φ trend); trend' = β (level' − level) + (1−β) φ trend;
    forecast(h) = level + (φ + … + φ^h) trend (Gardner & McKenzie, 1985)

    Damped, because load that climbs does not climb for ever. Load is in any unit (requests,
    tokens); time without any counts as zero load. After `memory` slices of `slice_s` without load
    the forecast is exactly zero. The clock is passed in. Raises ValueError unless the sizes are
    positive.
    """

    def __init__(self, slice_s: float = 10.0, memory: int = 60) -> None:
        if not (math.isfinite(slice_s) and slice_s > 0 and memory > 0):
            raise ValueError(f"slices of {slice_s} s, memory of {memory}; both must be positive")
        self.slice_s = slice_s
        self._rates: deque[float] = deque(maxlen=memory)
        self._shortfalls: deque[float] = deque(maxlen=memory)
        self._level = self._trend = self._amount = 0.0
        self._epoch: int | None = None

    def add(self, now_s: float, amount: float) -> None:
        """Count `amount` of load that arrived at `now_s`.

        Raises ValueError unless it is finite and not negative.
        """
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(f"load is {amount}; give a finite amount that is not negative")
        self._roll(now_s)
        self._amount += amount

    def expected(self, now_s: float, ahead_s: float = 0.0) -> float:
        """Return the load per second expected `ahead_s` from now; never negative or NaN.

        0 without traffic.
        """
        self._roll(now_s)
        steps = max(1, math.ceil(ahead_s / self.slice_s))
        damped = PHI * (1 - PHI**steps) / (1 - PHI)
        return max(0.0, self._level + damped * self._trend)

    def peak(self, now_s: float, ahead_s: float = 0.0, quantile: float = 0.95) -> float:
        """Return the load per second to provide for, `ahead_s` from now.

        It is the expected load plus the `quantile` of the amounts by which recent load exceeded its
        forecast. Raises ValueError for a quantile outside (0, 1].
        """
        expected = self.expected(now_s, ahead_s)
        return expected + (percentile(self._shortfalls, quantile) if self._shortfalls else 0.0)

    def _roll(self, now_s: float) -> None:
        epoch = math.floor(now_s / self.slice_s)
        if self._epoch is None:
            self._epoch = epoch
        ended = epoch - self._epoch
        if ended <= 0:
            return
        self._epoch = epoch
        self._close(self._amount / self.slice_s)
        self._amount = 0.0
        for _ in range(min(ended - 1, self._rates.maxlen or 0)):
            self._close(0.0)

    def _close(self, rate: float) -> None:
        first = not self._rates
        self._rates.append(rate)
        if not any(self._rates):
            self._level = self._trend = 0.0
            self._shortfalls.clear()
            return
        if first:
            self._level = rate
            return
        before, forecast = self._level, self._level + PHI * self._trend
        self._shortfalls.append(max(0.0, rate - forecast))
        self._level = max(0.0, forecast + ALPHA * (rate - forecast))
        self._trend = BETA * (self._level - before) + (1 - BETA) * PHI * self._trend
