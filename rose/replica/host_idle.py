"""A guest switches weights while its host is idle: the engine's gate does not cover a pause."""

import asyncio
import logging
import os

from executor import ControlPage, PageError

PATIENCE_S = 2.0
POLL_S = 0.002
_LOG = logging.getLogger(__name__)


class HostPatience:
    """Waits for an idle host, PATIENCE_S over all of its waits; then it goes on all the same."""

    def __init__(self) -> None:
        self._left_s = PATIENCE_S

    async def wait(self) -> bool:
        """Return once the host is idle, or when no patience is left; True when it was idle."""
        if self._left_s <= 0:
            return False
        clock_s = asyncio.get_running_loop().time
        began_s = clock_s()
        idle = await wait_host_idle(self._left_s)
        self._left_s = self._left_s - (clock_s() - began_s) if idle else 0.0
        return idle


async def wait_host_idle(patience_s: float | None = None) -> bool:
    """Return once the host is idle, or after PATIENCE_S; True when it was idle.

    A replica without a host returns at once. The page is opened anew for each wait: a host that
    was restarted may have brought another one.
    """
    limit_s = PATIENCE_S if patience_s is None else patience_s
    path = os.environ.get("ROSE_CONTROL_PAGE")
    if not path or os.environ.get("ROSE_ROLE") != "guest":
        return True
    try:
        with ControlPage.open(path) as page:
            idle = await _poll(page, limit_s)
    except PageError as error:
        _LOG.warning("the host's control page is unreadable (%s); switching all the same", error)
        return False
    if not idle:
        _LOG.warning("the host was not idle for %.1f s; switching all the same", limit_s)
    return idle


async def _poll(page: ControlPage, limit_s: float) -> bool:
    clock_s = asyncio.get_running_loop().time
    deadline_s = clock_s() + limit_s
    while True:
        state = page.host.peek()
        if state is not None and state.idle:
            return True
        if clock_s() >= deadline_s:
            return False
        await asyncio.sleep(POLL_S)
