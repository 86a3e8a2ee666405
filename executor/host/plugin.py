"""Host plugin of any engine: its seat on the page, its published state, and its lending.

    attach ──► publishes ── anything is wrong ──► gives up: the stock engine, and a veto of guests

Each engine core of a data-parallel host has a plugin and a seat of its own.

The host never depends on ROSE: any error in here is logged once, and from then on the engine is the
stock one. A host that does not publish vetoes the guests of its page for as long as it lives.

`LatencyWriter` publishes latencies from each API process of a host, into a lane of its own.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from executor.control_page.host_description import LENDING, TEXT_CHARS, HostDescription
from executor.control_page.host_seat import HostSeat, Veto
from executor.control_page.latency_ring import LatencyLane
from executor.control_page.page import ControlPage, check_folder
from executor.control_page.seqlock_records import LatencyRecord
from executor.engine_settings import HOST, LEND, EngineSettings, page_path_of
from executor.errors import ExecutorError, PageError
from executor.host.kv_lender import HostLender
from executor.host.state_publisher import StatePublisher
from executor.kv.lending import LendingLimits
from executor.step_log import StepLog

SERVES_ON = "the host is no longer published; it serves on without ROSE"
UNPUBLISHED = "request latencies are not published; the host serves on"
KEEPS = "KV memory is not lent; the host serves on with its whole pool"

Publisher = TypeVar("Publisher", bound=StatePublisher)


def lending_limits(settings: EngineSettings) -> LendingLimits:
    """Return the limits on lending that the settings name."""
    return LendingLimits(settings.reserve, cold_ns=round(settings.prefix_cold_s * 1e9))


class HostPlugin(ABC, Generic[Publisher]):
    """Base of the host plugins: publishes one engine core's state and lends its KV memory.

    Inert unless ROSE_ROLE=host.
    """

    log: ClassVar[logging.Logger]
    publisher: type[Publisher]
    """Class that publishes this engine's state."""
    _observer: Publisher | None = None
    _lender: HostLender | None = None
    _seat: HostSeat | None = None
    _veto: Veto | None = None

    @property
    def observer(self) -> Publisher | None:
        """Publisher of the engine's state; None before `attach` and after an error."""
        return self._observer

    @property
    def lender(self) -> HostLender | None:
        """Lender of the engine's KV memory; None if nothing is lent or still out."""
        return self._lender

    @property
    def _core(self) -> tuple[int, int]:
        """Number of this engine core, and the number of its host's engine cores."""
        return 0, 1

    @property
    def _engine(self) -> Any:  # noqa: ANN401 -- the engine's scheduler
        return self

    def attach(self) -> None:
        """Take the seat of the page that the environment names, publish, and lend if it says so.

        An error is logged, and the engine serves without ROSE.
        """
        self._observer = None
        self._quietly(self._attach)

    def give_up(self) -> None:
        """Stop publishing and lending for good, and veto the guests of the page."""
        self._observer = None
        # Without a published state no guest learns of lent memory, so take it back.
        self.stop_lending()
        try:
            if self._seat is not None:
                self._seat.cease()
        except Exception:  # noqa: BLE001 -- what failed just now may fail again
            self.log.warning("its last state stays on the page; it is not believed for long")
        path = _page_path()
        if self._veto is None and path and os.environ.get("ROSE_ROLE") == HOST:
            try:
                check_folder(Path(path).parent)
            except PageError:
                return  # No guest runs by a page on a disk, and a veto there would wait for it.
            self._veto = Veto(Path(path))
            self._veto.start()

    def stop_lending(self, why: Exception | None = None) -> None:
        """Take lent memory back and restore the engine's own pool; on a GPU that takes steps.

        why: the error that is the cause, which is logged.
        """
        lender = self._lender
        if lender is None:
            return
        if why is not None:
            self.log.error("%s: %s", KEEPS, why)
        try:
            lender.stop(why)
        except Exception:
            self.log.exception("%s, as far as it came back", KEEPS)
            self._lender = None
        else:
            if lender.over:
                self._lender = None

    @abstractmethod
    def _check(self) -> tuple[str, str]:
        """Return the engine's name with its version, and the support of that version.

        Raises ExecutorError if this engine cannot be a host.
        """

    @abstractmethod
    def _make_lender(self, settings: EngineSettings) -> HostLender:
        """Return a lender over the engine's KV pool. Raises ExecutorError if it cannot be lent."""

    @abstractmethod
    def _identity(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the served model, and the UUIDs of the GPUs."""

    @abstractmethod
    def _demand(self) -> tuple[int, int]:
        """Return the number of unfinished requests, and the tokens of the longest waiting one."""

    def _attach(self) -> None:
        settings = EngineSettings.from_environ(os.environ)
        if settings.role != HOST:
            return
        checked = self._check()
        page, seat = _seated(settings, *self._core)
        self._seat = seat
        log = StepLog.from_environ(os.environ, HOST)
        lacks = self._begin_lending(settings) if settings.level == LEND else ()
        targets_s = settings.ttft_s, settings.tpot_s
        observer = self.publisher(
            self._engine, seat, targets_s, step_log=log, lender=lambda: self._lender
        )
        # The idle host: its guest may run before the first request comes.
        observer.publish()
        self._observer = observer
        seat.start()
        if self._core[0] == 0:
            # Last: a node may start a guest once it has found this.
            model, devices = self._identity()
            said = HostDescription(
                model[-TEXT_CHARS:], *targets_s, devices, seat.taken_ns, *checked, lacks
            )
            with nullcontext() if settings.found else suppress(PageError):
                said.write(page.path, settings.page_group)

    def _leave(self) -> None:
        seat, self._seat, self._observer = self._seat, None, None
        veto, self._veto = self._veto, None
        for held in (seat, veto):
            if held is not None:
                held.close()

    def _begin_lending(self, settings: EngineSettings) -> tuple[str, ...]:
        """Make the lender; return the capability that the engine lacks, with the reason."""
        try:
            self._lender = self._make_lender(settings)
        except Exception as error:  # noqa: BLE001 -- the host is worth more than what it lends
            self.log.error("%s: %s", KEEPS, error)  # noqa: TRY400 -- one line says it all
            return (" ".join(f"{LENDING}: {error}".split())[:TEXT_CHARS],)
        return ()

    def _lend(self, *, arrived: bool = False) -> None:
        lender, observer = self._lender, self._observer
        if lender is None:
            return
        tokens = observer.queued_prefill_tokens if observer is not None else 0
        at_once = True  # The step of a busy host publishes what it changed.
        try:
            requests, next_tokens = self._demand()
            if arrived:
                at_once = lender.arrived(tokens, requests)
            else:
                lender.step(tokens, requests, next_tokens)
                at_once = requests == 0
        except Exception as error:  # noqa: BLE001 -- as above
            self.stop_lending(error)
        if lender.over:
            self._lender = None
        if at_once and observer is not None:
            self._quietly(observer.publish_loan)

    def _quietly(self, observe: Callable[..., None], *args: object) -> None:
        try:
            observe(*args)
        except ExecutorError as error:
            self.give_up()
            self.log.error("%s: %s", SERVES_ON, error)  # noqa: TRY400 -- the message says it all
        except Exception:
            self.give_up()
            self.log.exception(SERVES_ON)


def _seated(settings: EngineSettings, core: int, cores: int) -> tuple[ControlPage, HostSeat]:
    page = ControlPage.ensure(settings.page_path, settings.page_group)
    try:
        return page, page.take_host(core=core, cores=cores)
    except PageError:
        if not page.replaced:
            raise
    # A node removed an earlier life's page, just before the lock was taken.
    page = ControlPage.ensure(settings.page_path, settings.page_group)
    return page, page.take_host(core=core, cores=cores)


def _page_path() -> str:
    try:
        return page_path_of(os.environ)
    except PageError:
        return ""  # Where it has no page no guest can run by it.


class LatencyWriter:
    """Writer of request latencies into the page's ring; inert unless ROSE_ROLE=host.

    Each API process of a host has one, and with it a lane of its own. Errors are logged, not
    raised.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lane: LatencyLane | None = None
        try:
            settings = EngineSettings.from_environ(os.environ)
            if settings.role == HOST:
                page = ControlPage.ensure(settings.page_path, settings.page_group)
                self._lane = page.take_lane()
        except ExecutorError as error:
            log.error("%s: %s", UNPUBLISHED, error)  # noqa: TRY400 -- one line says it all
        except Exception:
            log.exception(UNPUBLISHED)

    @property
    def open(self) -> bool:
        """True while records are published; False in another role and after an error."""
        return self._lane is not None

    def append(self, records: Callable[[], Iterable[LatencyRecord]]) -> None:
        """Publish the records that `records()` returns; an error is logged and ends publishing."""
        if self._lane is None:
            return
        try:
            for record in records():
                self._lane.append(record)
        except Exception:  # noqa: BLE001 -- the host serves on
            self._lane = None
            self._log.exception(UNPUBLISHED)
