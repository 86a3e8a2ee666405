"""Memory of the run, sampled while it runs."""

import asyncio
import time

from rose.demo.board import Board
from rose.demo.layout import Layout
from rose.demo.stack import Stack
from rose.demo.usage import memory_bytes
from rose.eventlog import KEEP_ALL, JsonlLog

# Reading the map of a process with torch in it takes milliseconds: seldom enough not to matter.
SAMPLE_INTERVAL_S = 5.0


async def sample_memory(stack: Stack, layout: Layout, board: Board) -> None:
    """Write `memory.jsonl` until cancelled."""
    with JsonlLog(layout.out / "memory.jsonl", KEEP_ALL) as log:
        while True:
            sizes = await asyncio.to_thread(memory_bytes, stack.roots)
            board.memory_bytes = sum(sizes.values())
            log.write({"t_s": time.monotonic(), "bytes": sizes})
            await asyncio.sleep(SAMPLE_INTERVAL_S)
