"""A guest's API process at the control page, beside the gate in its engine process.

    wait_host_idle   new weights are loaded and written while the host is idle and a grant is live
    keep_waking      an idle engine core whose KV memory is owed to the host has to be woken for it
    yielded_s        a warm-up does not count the time in which the gate lets nothing run

Only this module knows whether the replica is a guest, and opens the page in its API process.
Without a host it waits for nothing and wakes nothing.

An idle engine core blocks on its input queue, and only its own thread may touch the block pool. Any
utility call ends that wait; the core then asks its scheduler whether there is work, and
`GatedScheduler.has_requests` returns True until the memory is back.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Final

from executor import (
    ControlPage,
    GateLimits,
    Grant,
    GuestState,
    HostState,
    PageError,
)
from executor.control_page.page import PAGE_GROUP
from executor.step_decision import may_use_idle_host
from rose.replica.engine import ReplicaEngine
from weight_transfer import WeightError

IDLE_POLL_S: Final = 0.002
_LIMITS: Final = GateLimits()
WAKE_POLL_S: Final = 0.01
WAKE_AGAIN_S: Final = 0.1
_LOG = logging.getLogger("vllm.rose.replica")


class HostBusyError(WeightError):
    """Error raised because the host was not idle within the guest's patience; no weights were
    written.
    """


class GuestControl:
    """Reader of the control page in a guest's API process (in its event loop); in any other replica
    its methods do nothing.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Read the page's path from the environment; the page is opened on first use, which reports
        an unreadable one.
        """
        self._path = environ.get("ROSE_CONTROL_PAGE", "")
        self._group = environ.get(PAGE_GROUP, "")
        self._by_handle = bool(environ.get("ROSE_PAGE_SOCKET"))
        self._page: ControlPage | None = None
        self._waking: asyncio.Task[None] | None = None
        self.is_guest = bool(self._path) and environ.get("ROSE_ROLE") == "guest"

    @property
    def page(self) -> ControlPage:
        """Control page, opened on first use and then kept even if its file is replaced. Raises
        PageError if it cannot be read.
        """
        if self._page is None:
            self._page = ControlPage.open(self._path, self._group)
        return self._page

    async def wait_host_idle(self, patience_s: float) -> None:
        """Wait until the host is idle and a live grant lets the guest compute; return at once
        without a host.

        Raises HostBusyError after `patience_s` seconds, so the guest keeps its version and its node
        asks again later. An unreadable page counts as a busy host.
        """
        if not self.is_guest:
            return
        clock_s = asyncio.get_running_loop().time
        deadline_s = clock_s() + patience_s
        told = ""
        while True:
            try:
                view, grant = self.page.host_view(), self.page.grant.peek()
                now_ns = time.monotonic_ns()
                if may_use_idle_host(view, grant, now_ns, _LIMITS, unleased=True):
                    return
            except PageError as error:
                if told != str(error):
                    told = str(error)
                    _LOG.warning("the host's control page is unreadable: %s", error)
            if clock_s() >= deadline_s:
                raise HostBusyError(
                    "the host is too busy for new weights beside it, or no grant lets this guest"
                    " compute; ask again later"
                )
            await asyncio.sleep(IDLE_POLL_S)

    def yielded_s(self) -> float | None:
        """Return the seconds for which the guest's gate has held back work since the engine
        started; None without a host, or if unknown.

        Raises PageError.
        """
        guest = self.page.guest.peek() if self.is_guest else None
        return None if guest is None else guest.yielded_ns / 1e9

    def start_waking(self, engine: ReplicaEngine) -> None:
        """Start the task that wakes a guest's idle engine when its memory is wanted; do nothing
        without a host.
        """
        if self.is_guest:
            self._waking = asyncio.get_running_loop().create_task(self.keep_waking(engine))

    def stop_waking(self) -> None:
        """Cancel the task that wakes the engine, if it runs."""
        if self._waking is not None:
            self._waking.cancel()

    async def keep_waking(self, engine: ReplicaEngine) -> None:
        """Wake the engine, every 10 ms, while the host wants memory back; return only when the
        engine has ended or the page is unreadable.
        """
        while True:
            await asyncio.sleep(WAKE_POLL_S)
            try:
                if self._memory_is_wanted():
                    await engine.wake()
            except engine.failures as error:
                _LOG.warning("the engine is gone, and its memory with it: %s", error)
                return
            except PageError as error:
                _LOG.warning("an idle guest will not return memory: %s", error)
                return
            except Exception:  # noqa: BLE001 - whatever an engine raises: said, and a pause
                # A guest that is woken no more would keep its host's memory while it idles.
                _LOG.exception("an idle guest was not woken; it is looked at again")
                await asyncio.sleep(WAKE_AGAIN_S)

    def _memory_is_wanted(self) -> bool:
        page = self.page
        if owes_memory(page.grant.peek(), page.guest.peek()):
            return True
        # A host that lends by handle asks on a socket, which an idle engine does not read.
        return self._by_handle and misses_memory(page.host_state)


def owes_memory(grant: Grant | None, guest: GuestState | None) -> bool:
    """Return True if the grant caps KV granules below what the guest has mapped; False for a cap of
    0 or less, or without either state.
    """
    if grant is None or guest is None or grant.kv_granule_cap <= 0:
        return False
    return guest.granules_mapped > grant.kv_granule_cap


def misses_memory(host: HostState | None) -> bool:
    """Return True if the host lacks granules of its KV reserve; False without a host state."""
    return host is not None and host.reserve_missing > 0
