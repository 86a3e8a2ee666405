"""Event loop of asyncio inside the simulation: the product's own coroutines, by simulated time.

    timer, message ──► an event of the world ──► its callback, and all that becomes ready by it,
                                                 at the same moment

One loop is one life of a process: a crash ends its tasks where they stand, a pause holds its timers
back with the process's messages. Nothing here waits, and no thread is ever asked.
"""

import asyncio
from asyncio import events
from collections.abc import Callable
from contextvars import Context
from typing import Any

from typing_extensions import override

from rose.simulation.clock import CallbackLoop
from tests.chaos.simulation import SKIPPED, SimulatedProcess

# At one moment: a loop that turns on the spot is a bug.
MOST_CALLBACKS = 20_000
MOST_CLOSES = 8
# A timer is never due a little before its time, by whatever clock its caller looks at.
ROUNDING_S = 1e-6


class SimulatedLoop(CallbackLoop):
    """Loop of one process. `failed` takes what broke outside of any task."""

    def __init__(self, process: SimulatedProcess, failed: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._process = process
        self._failed = failed
        self.closed = False

    def run(self, call: Callable[[], object]) -> None:
        """Run a call and all that becomes ready by it, at this moment."""
        if self.closed:
            return
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            call()
            for _ in range(MOST_CALLBACKS):
                if not self._ready or self.closed:
                    return
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
            raise RuntimeError(f"{self._process.name} turns on the spot")
        finally:
            events._set_running_loop(before)

    def end(self) -> None:
        """End every task where it stands: the process is gone, and says nothing any more."""
        self.closed = True
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
        finally:
            events._set_running_loop(before)
        self._ready.clear()

    # ---- what asyncio asks of a loop ----

    @override
    def time(self) -> float:
        return self._process.now_s()

    @override
    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def due() -> object:
            if handle.cancelled() or self.closed:
                return SKIPPED
            self.run(handle._run)
            return None

        process = self._process
        process.world.at((when - self.time()) / process.clock_rate + ROUNDING_S, process, due)
        return handle

    @override
    def is_closed(self) -> bool:
        return self.closed

    @override
    def _broke(self, error: BaseException) -> None:
        if not self.closed:
            self._failed(error)


def _close(coroutine: Any) -> None:
    """Close it, also where what it does at its end would wait."""
    for _ in range(MOST_CLOSES):
        try:
            coroutine.close()
        except RuntimeError:
            continue
        except Exception:
            return
        return
