"""An event loop whose time passes only while nobody can do anything: hours in milliseconds.

Nothing outside the program can wake such a loop, so when every task waits and no timer is set, it
would wait for ever: that is raised instead.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StandsStillError(AssertionError):
    """Every task waits for another one."""


class _Skipping(selectors.PollSelector):
    """Waits by moving the clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise StandsStillError("every task waits for another one")
        if not ready and timeout is not None:
            self.now_s += max(0.0, timeout)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises StandsStillError for a deadlock."""
    loop = _VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
