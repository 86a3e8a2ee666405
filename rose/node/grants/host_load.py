"""Load of a host as capacity policies see it: busy share, and requests by their targets."""

import time
from collections.abc import Callable
from typing import Final

from executor import LatencyRecord

# Shorter ones say more about steps than about load.
LEAST_INTERVAL_S: Final = 0.9


class SloCounter:
    """Requests of a host that met both targets, and those that missed one; they only grow."""

    def __init__(self, ttft_s: float = 0.5, tpot_s: float = 0.15) -> None:
        self._ttft_ns, self._tpot_ns = round(ttft_s * 1e9), round(tpot_s * 1e9)
        self.good = 0
        self.bad = 0

    def count(self, record: LatencyRecord) -> None:
        """Count one finished request (in the thread that reads them)."""
        if record.ttft_ns <= self._ttft_ns and record.tpot_ns <= self._tpot_ns:
            self.good += 1
        else:
            self.bad += 1


class HostLoad:
    """Busy share of a host, from a counter of busy time that only grows."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._since: tuple[int, int] | None = None
        self._share: float | None = None

    def busy_share(self, busy_ns: int | None) -> float | None:
        """Return the busy share of about the last second; None while unknown."""
        now_ns = self._clock_ns()
        if busy_ns is None or self._since is None or busy_ns < self._since[1]:
            self._since = None if busy_ns is None else (now_ns, busy_ns)
            self._share = None
            return None
        elapsed_ns = now_ns - self._since[0]
        if elapsed_ns >= LEAST_INTERVAL_S * 1e9:
            # A step that ends in the interval may have begun before it.
            self._share = min(1.0, (busy_ns - self._since[1]) / elapsed_ns)
            self._since = now_ns, busy_ns
        return self._share
