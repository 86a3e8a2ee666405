"""An event loop on a thread of its own, for callers that have none."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from rose.client.errors import ClientClosed

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any thread; ends with `stop`, or with the process."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it runs in this process: a fork leaves the thread behind."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, awaited on the loop; whoever is interrupted cancels it."""
        if not self.alive:
            work.close()
            raise ClientClosed("the client's thread has ended: open the client anew")
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientClosed("called from the client's own loop: use RolloutClient there")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End loop and thread; what still runs is cancelled."""
        if not self.alive:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
