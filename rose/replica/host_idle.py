"""A guest takes weights while its host is idle: the engine's gate covers neither that nor a pause.

A host that is never idle keeps its guest at the version that it has. The guest says so, and its
node asks again later.
"""

import asyncio
import logging
import os
import time

from executor import ControlPage, PageError
from executor.control_page import PAGE_GROUP
from weight_transfer import WeightError

POLL_S = 0.002
_LOG = logging.getLogger(__name__)


class HostBusyError(WeightError):
    """The host was not idle for as long as the guest waits. Nothing was written."""


class HostPatience:
    """Waits for an idle host, as often as asked, but no longer than `left_s` seconds in all."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s

    async def wait(self) -> None:
        """Return once the host is idle. Raises HostBusyError when no patience is left."""
        clock_s = asyncio.get_running_loop().time
        began_s = clock_s()
        await wait_host_idle(self._left_s)
        self._left_s = max(0.0, self._left_s - (clock_s() - began_s))


async def wait_host_idle(patience_s: float) -> None:
    """Return once the host is idle. Raises HostBusyError when it is not within `patience_s`.

    A replica without a host returns at once. The page is opened anew for each wait: a host that
    was restarted may have brought another one. A page that cannot be read is no idle host.
    """
    path = os.environ.get("ROSE_CONTROL_PAGE")
    if not path or os.environ.get("ROSE_ROLE") != "guest":
        return
    try:
        with ControlPage.open(path, os.environ.get(PAGE_GROUP, "")) as page:
            idle = await _poll(page, patience_s)
    except PageError as error:
        _LOG.warning("the host's control page is unreadable: %s", error)
        await asyncio.sleep(patience_s)
        idle = False
    if not idle:
        raise HostBusyError("the host is too busy for new weights beside it; ask again later")


async def _poll(page: ControlPage, limit_s: float) -> bool:
    clock_s = asyncio.get_running_loop().time
    deadline_s = clock_s() + limit_s
    while True:
        state = page.host_sight().believed(time.monotonic_ns())
        if state is not None and state.idle:
            return True
        if clock_s() >= deadline_s:
            return False
        await asyncio.sleep(POLL_S)
