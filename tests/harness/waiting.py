"""Waits of tests for other processes and tasks, with a bound that says what was missing.

And a clock that a test sets.
"""

import asyncio
import time
from collections.abc import Callable

# Far above what anything takes, on a machine that is busy with others too; below a test's timeout.
PATIENCE_S = 30.0


def until(check: Callable[[], object], within_s: float, what: str, every_s: float = 0.002) -> float:
    """Return the seconds until `check` held."""
    began_s = time.monotonic()
    while not check():
        assert time.monotonic() - began_s < within_s, f"not within {within_s} s: {what}"
        time.sleep(every_s)
    return time.monotonic() - began_s


async def until_async(
    check: Callable[[], object], within_s: float, what: str, every_s: float = 0.002
) -> float:
    """Wait as `until` does, beside other tasks of the loop."""
    began_s = time.monotonic()
    while not check():
        assert time.monotonic() - began_s < within_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(every_s)
    return time.monotonic() - began_s


class HandClock:
    """Clock that shows what a test writes into `now_s`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def ns(self) -> int:
        return int(self.now_s * 1e9)
