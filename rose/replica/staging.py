"""Staging from the API process: the worker decodes beside its engine, then loads piece by piece."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rose.replica.host_idle import HostPatience

POLL_S: Final = 0.01
PATIENCE_S = 20.0
"""With a busy host, over all pieces; a node waits for the whole update for a minute."""
Call = Callable[..., Awaitable[dict[str, Any]]]
"""Calls a worker method on all ranks; `done` of its answer means: on all of them."""


async def stage(call: Call, manifests: list[str], chunks: str) -> dict[str, Any]:
    """Have versions verified, decoded and computed while the engine serves; what it is like.

    Raises what the workers raise, and HostBusyError; nothing is written then.
    """
    await call("rose_weights_stage_begin", manifests, chunks)
    while True:
        if (await call("rose_weights_stage_poll"))["done"]:
            break
        await asyncio.sleep(POLL_S)
    patience = HostPatience(PATIENCE_S)
    while True:
        await patience.wait()
        began_s = time.perf_counter()
        staged = await call("rose_weights_stage_step", 1)
        if staged["done"]:
            return staged
        # A piece holds up the engine's steps: they get as much time as it took.
        await asyncio.sleep(time.perf_counter() - began_s)
