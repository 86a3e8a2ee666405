"""A guest switches weights while its host is idle: the engine's gate does not cover a pause."""

import asyncio
import logging
import os

from executor import ControlPage, PageError

PATIENCE_S = 2.0
POLL_S = 0.002
_LOG = logging.getLogger(__name__)


async def wait_host_idle() -> bool:
    """Return once the host is idle, or after PATIENCE_S; True when it was idle.

    A replica without a host returns at once. The page is opened anew for each wait: a host that
    was restarted may have brought another one.
    """
    path = os.environ.get("ROSE_CONTROL_PAGE")
    if not path or os.environ.get("ROSE_ROLE") != "guest":
        return True
    try:
        with ControlPage.open(path) as page:
            idle = await _poll(page)
    except PageError as error:
        _LOG.warning("the host's control page is unreadable (%s); switching all the same", error)
        return False
    if not idle:
        _LOG.warning("the host was not idle for %.1f s; switching all the same", PATIENCE_S)
    return idle


async def _poll(page: ControlPage) -> bool:
    clock_s = asyncio.get_running_loop().time
    deadline_s = clock_s() + PATIENCE_S
    while True:
        state = page.host.peek()
        if state is not None and state.idle:
            return True
        if clock_s() >= deadline_s:
            return False
        await asyncio.sleep(POLL_S)
