"""Watchdog of a guest: ends its process when it is orphaned or to be killed.

It is a thread of its own, because an idle engine core runs no scheduler code at all and an orphaned
guest must still end itself.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from executor.control_page.page import ControlPage
from executor.freeze_reason import FreezeReason
from executor.grant_controller import GrantLiveness

TICK_S: Final = 0.02
EXIT_ORPHANED: Final = 75
EXIT_KILLED: Final = 76
EXIT_BROKEN: Final = 77


class Watchdog(threading.Thread):
    """Thread that judges the grant every TICK_S, beats on the page, and may end the process."""

    def __init__(
        self,
        page: ControlPage,
        orphan: GrantLiveness,
        beat: Callable[[int], None],
        leave: Callable[[int], object] = os._exit,
        tick_s: float = TICK_S,
    ) -> None:
        super().__init__(name="rose-watchdog", daemon=True)
        self._page = page
        self._orphan = orphan
        self._beat = beat
        self._leave = leave
        self._tick_s = tick_s

    def run(self) -> None:
        """Watch until the process has to end. An error of the watchdog ends the process too."""
        code = EXIT_BROKEN
        try:
            code = self._watch()
        finally:
            self._leave(code)

    def _watch(self) -> int:
        # Bounded by the life of the process: there is nothing else for this thread to return to.
        while True:
            now_ns = time.monotonic_ns()
            why = self._orphan.step(now_ns, self._page.grant.peek())
            if why is not None:
                # os._exit flushes nothing, and a frozen engine may hold every lock of logging.
                os.write(sys.stderr.fileno(), f"rose: guest ends itself: {why}\n".encode())
                return EXIT_KILLED if why is FreezeReason.KILLED else EXIT_ORPHANED
            self._beat(now_ns)
            time.sleep(self._tick_s)
