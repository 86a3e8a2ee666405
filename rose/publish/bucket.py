"""TokenBucket: so many bytes a second on the average, a bounded burst at once."""


class TokenBucket:
    """Pays first and waits afterwards, so one piece larger than the burst still passes.

    The clock is handed in: seconds of one monotonic clock.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        if bytes_per_s <= 0 or burst_bytes <= 0:
            raise ValueError("bytes_per_s and burst_bytes must be positive")
        self._rate = bytes_per_s
        self._burst = burst_bytes
        self._level = burst_bytes
        self._at_s: float | None = None

    def take(self, size: int, now_s: float) -> float:
        """Pay for `size` bytes; how long to wait before taking more, in seconds."""
        elapsed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._level = min(self._burst, self._level + elapsed_s * self._rate) - size
        self._at_s = now_s
        return max(0.0, -self._level / self._rate)
