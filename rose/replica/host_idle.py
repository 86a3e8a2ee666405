"""A guest switches weights while its host is idle: the engine's gate does not cover a pause."""

import asyncio
import logging
import os
from functools import cache

from executor import ControlPage

PATIENCE_S = 2.0
POLL_S = 0.002
_LOG = logging.getLogger(__name__)


async def wait_host_idle() -> bool:
    """Return once the host is idle, or after PATIENCE_S; True when it was idle.

    A replica without a host returns at once.
    """
    page = _page()
    if page is None:
        return True
    deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
    while asyncio.get_running_loop().time() < deadline_s:
        state = page.host.peek()
        if state is not None and state.idle:
            return True
        await asyncio.sleep(POLL_S)
    _LOG.warning("the host was never idle for %.0f s; switching weights all the same", PATIENCE_S)
    return False


@cache
def _page() -> ControlPage | None:
    path = os.environ.get("ROSE_CONTROL_PAGE")
    guest = os.environ.get("ROSE_ROLE") == "guest"
    return ControlPage.open(path) if path and guest else None
