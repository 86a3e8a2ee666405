"""When cyclic garbage is looked for: while no token waits.

A live stream is some two hundred objects, and looking at one takes a microsecond or two. So with
thousands of streams even young generations cost a third of the processor and pauses of tens of
milliseconds, and find nothing: a turn leaves no cycles behind, its objects go by their counts.
"""

import asyncio
import gc
from collections.abc import Callable

LOOK_S = 60.0
# Net new objects, some 400 MB: should anything leave cycles after all, they go though turns run.
TOO_MANY = 4_000_000


async def collect_when_idle(live_turns: Callable[[], int], look_s: float = LOOK_S) -> None:
    """Take over from the automatic collector until cancelled."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        while True:
            await asyncio.sleep(look_s)
            # With the collector off the young generation's count is that of all new objects.
            if not live_turns() or gc.get_count()[0] > TOO_MANY:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
