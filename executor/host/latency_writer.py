"""Writer of a host's request latencies, into a lane of the page's ring that is its own."""

import logging
import os
from collections.abc import Callable, Iterable

from executor.control_page.latency_ring import LatencyLane
from executor.control_page.page import ControlPage
from executor.control_page.seqlock_records import LatencyRecord
from executor.engine_settings import HOST, EngineSettings
from executor.errors import ExecutorError

UNPUBLISHED = "request latencies are not published; the host serves on"


class LatencyWriter:
    """Writer of records while nothing is wrong; inert unless ROSE_ROLE=host.

    Each API process of a host has one, and with it a lane of its own.
    """

    def __init__(self, log: logging.Logger, check: Callable[[], None] = lambda: None) -> None:
        """check: raises ExecutorError if the engine's latencies cannot be read."""
        self._log = log
        self._lane: LatencyLane | None = None
        try:
            settings = EngineSettings.from_environ(os.environ)
            if settings.role == HOST:
                check()
                page = ControlPage.ensure(settings.page_path, settings.page_group)
                self._lane = page.take_lane()
        except ExecutorError as error:
            log.error("%s: %s", UNPUBLISHED, error)  # noqa: TRY400 -- one line says it all
        except Exception:
            log.exception(UNPUBLISHED)

    @property
    def open(self) -> bool:
        """True while records are published."""
        return self._lane is not None

    def append(self, records: Callable[[], Iterable[LatencyRecord]]) -> None:
        """Publish the records of `records`; an error in it is logged once and ends that."""
        if self._lane is None:
            return
        try:
            for record in records():
                self._lane.append(record)
        except Exception:  # noqa: BLE001 -- the host serves on
            self._lane = None
            self._log.exception(UNPUBLISHED)
