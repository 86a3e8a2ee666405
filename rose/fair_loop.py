"""An event loop that lets the other threads of its process run.

A loop with much to do asks for ready sockets without waiting, over and over. Each time it gives up
the interpreter's lock for about a microsecond, too short for a thread that sleeps until the lock is
free, and CPython counts it as given up: it makes no one hand over what was free a moment ago. So a
peer that keeps a loop busy could keep another thread from the lock for half a second.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any

# As long as CPython lets a thread keep the lock that others wait for.
MOST_WITHOUT_WAIT_S = 0.005
# Several times what a thread takes to wake up on an idle core.
PAUSE_S = 0.0002


class FairSelector(selectors.DefaultSelector):
    """A selector that sleeps `PAUSE_S` once in `MOST_WITHOUT_WAIT_S` if nothing else makes it."""

    def __init__(self) -> None:
        super().__init__()
        self._waited_s = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As of every selector; `timeout` in seconds, None for no end."""
        before_s = time.monotonic()
        if timeout is not None and timeout <= 0:
            if before_s - self._waited_s >= MOST_WITHOUT_WAIT_S:
                time.sleep(PAUSE_S)
                self._waited_s = time.monotonic()
            return super().select(timeout)
        ready = super().select(timeout)
        after_s = time.monotonic()
        if after_s - before_s >= PAUSE_S:
            self._waited_s = after_s
        return ready


def fair_loop() -> asyncio.AbstractEventLoop:
    """A new event loop; the caller closes it."""
    return asyncio.SelectorEventLoop(FairSelector())


def run_fairly(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, on a fair loop."""
    with asyncio.Runner(loop_factory=fair_loop) as runner:
        runner.run(main)
