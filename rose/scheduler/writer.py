"""Makes writes durable without holding the event loop: one at a time, tried until they are.

    write --> in a thread --> durable --> whoever waited goes on
                  ^  |
                  +--+ the store is locked, full or gone: again, after a pause

Somebody who looks into the file with another program locks it for as long as he likes. Meanwhile
live leases are renewed and tables are sent; what needs the store waits, and `stalled_s` says so.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rose.errors import UnavailableError
from rose.scheduler.messages import Write
from rose.store import Store

RETRY_S = 0.1
# A write that waits for longer is not a disk's pause: operators are told.
STALLED_S = 5.0

OnEvent = Callable[..., None]


class StoreWriter:
    """Writes to one store, in order. `on_event` gets store_stalled and store_answers."""

    def __init__(self, store: Store, on_event: OnEvent, stalled_s: float = STALLED_S) -> None:
        self._store = store
        self._on_event = on_event
        self._stalled_after_s = stalled_s
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "rose-store")
        self._since_s: float | None = None
        self._wrong = "its disk does not answer"
        self._said = False

    @property
    def stalled_s(self) -> float:
        """How long the oldest write has waited; 0 while none waits for longer than usual."""
        if self._since_s is None:
            return 0.0
        waited_s = time.monotonic() - self._since_s
        return waited_s if waited_s >= self._stalled_after_s else 0.0

    async def write(self, writes: Sequence[Write]) -> None:
        """Return once all of them are durable, however long that takes."""
        async with self._turn:
            self._since_s = time.monotonic()
            try:
                for each in writes:
                    await self._until_durable(each)
            finally:
                self._since_s = None
            if self._said:
                self._said = False
                self._on_event("store_answers")

    async def _until_durable(self, write: Write) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._thread, _put, self._store, write)
            except UnavailableError as error:
                self._wrong = str(error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def check(self) -> None:
        """Say so, once, when a write has waited for long: also where the disk just hangs."""
        if not self._said and self.stalled_s:
            self._said = True
            self._on_event("store_stalled", message=self._wrong)

    def close(self) -> None:
        """Wait for the write that is under way, so that the store may be closed."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _put(store: Store, write: Write) -> None:
    if write.value is None:
        store.delete(write.key)
    else:
        store.put(write.key, write.value)
