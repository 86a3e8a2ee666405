"""Gate of an engine's start: each forward pass of it waits for an idle host, as steps do later.

    profile run, warm-up, graph capture ──► model(...) ──► gate: host idle, grant live? ──► runs

The scheduler that asks the gate is made last, so nothing else holds back the passes of a start.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, Self

from executor.control_page.page import ControlPage
from executor.engine_settings import GUEST, EngineSettings
from executor.guest.gate_client import logger
from executor.step_decision import GateLimits, may_use_idle_host

GATED_START: Final = "ROSE_GATED_START"

PAUSE_S: Final = 0.002


class StartGate:
    """Gate that opens on an idle host and a live grant; the length of a pass is unknown."""

    def __init__(
        self,
        page: ControlPage,
        limits: GateLimits | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._page = page
        self._limits = limits or GateLimits()
        self._clock_ns = clock_ns
        self._sleep = sleep
        self.passes = 0
        self.waited_ns = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self | None:
        """Return None for an engine that is no guest or whose node does not want it."""
        settings = EngineSettings.from_environ(environ)
        if settings.role != GUEST or environ.get(GATED_START) != "1":
            return None
        return cls(ControlPage.open(settings.page_path, settings.page_group))

    def wait(self) -> None:
        """Return when a pass may begin, without a bound: the watchdog ends an orphaned guest."""
        began_ns = self._clock_ns()
        logged = self.passes > 0
        while not self._open:
            if not logged:
                logger.info("the start waits until its host is idle and a grant is live")
                logged = True
            self._sleep(PAUSE_S)
        self.passes += 1
        self.waited_ns += self._clock_ns() - began_ns

    @property
    def _open(self) -> bool:
        grant = self._page.grant.peek()
        view = self._page.host_view()
        return may_use_idle_host(view, grant, self._clock_ns(), self._limits)

    def tell(self) -> None:
        """Log at the end of the start how long it waited, or that nothing asked."""
        if self.passes:
            waited_s = self.waited_ns / 1e9
            logger.info("%d passes of the start waited %.1f s for the host", self.passes, waited_s)
        else:
            logger.warning("the start asked the gate for no pass: this model runs beside its host")
