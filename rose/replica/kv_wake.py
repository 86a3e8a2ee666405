"""Wakes an idle guest whose KV memory is owed to its host.

An idle engine core blocks on its input queue, and only its own thread may touch the block pool. Any
utility call ends that wait; the core then asks its scheduler whether there is work, and
`GatedScheduler.has_requests` says yes until the memory is back.
"""

import asyncio
import logging
import os
from typing import Any, Final

from executor import ControlPage, Grant, GuestState, HostState, PageError
from executor.control_page.page import PAGE_GROUP
from rose.replica.turns import ENGINE_FAILURES

POLL_S: Final = 0.01
AGAIN_S: Final = 0.1
_LOG = logging.getLogger("vllm.rose.replica")


def owes_memory(grant: Grant | None, guest: GuestState | None) -> bool:
    """Whether a grant allows fewer granules than the guest keeps. One granule always stays."""
    if grant is None or guest is None or grant.kv_granule_cap <= 0:
        return False
    return guest.granules_mapped > grant.kv_granule_cap


def wanted_back(host: HostState | None) -> bool:
    """Whether a host that lends pages by handle misses some: it asks on a socket that an idle
    engine does not hear."""
    by_handle = bool(os.environ.get("ROSE_PAGE_SOCKET"))
    return by_handle and host is not None and host.reserve_missing > 0


class KvWaker:
    """A task beside a guest's engine for as long as its API process lives."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - vLLM's AsyncLLM
        self._engine = engine
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch, unless this replica has no control page or it cannot be mapped."""
        path = os.environ.get("ROSE_CONTROL_PAGE")
        if not path or os.environ.get("ROSE_ROLE") != "guest":
            return
        try:
            page = ControlPage.open(path, os.environ.get(PAGE_GROUP, ""))
        except PageError as error:
            _LOG.warning("an idle guest will not return memory: %s", error)
            return
        self._task = asyncio.get_running_loop().create_task(self._watch(page))

    def stop(self) -> None:
        """End the task, if it runs."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, page: ControlPage) -> None:
        with page:
            # Ends with the event loop, or with the engine.
            while True:
                await asyncio.sleep(POLL_S)
                try:
                    await self._look(page)
                except ENGINE_FAILURES as error:
                    _LOG.warning("the engine is gone, and its memory with it: %s", error)
                    return
                except Exception:  # noqa: BLE001 - whatever an engine raises: said, and a pause
                    # A guest whose waker ended would keep its host's memory while it idles.
                    _LOG.exception("an idle guest was not woken; it is looked at again")
                    await asyncio.sleep(AGAIN_S)

    async def _look(self, page: ControlPage) -> None:
        owes = owes_memory(page.grant.peek(), page.guest.peek())
        if owes or wanted_back(page.host.peek()):
            await self._engine.is_paused()
