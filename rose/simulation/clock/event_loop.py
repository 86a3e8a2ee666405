"""Event loop of asyncio by the virtual clock: the gateway's own coroutines, in no time at all.

    event ──► callback ──► all that becomes ready by it, at the same moment

Nothing here waits, and no thread is ever asked.
"""

import asyncio
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from typing_extensions import override

from rose.simulation.clock.callback_loop import CallbackLoop
from rose.simulation.clock.event_queue import NS, EventQueue

# At one moment: a loop that turns on the spot is a bug.
MOST_CALLBACKS = 2_000_000
MOST_ROUNDS = 16


class VirtualLoop(CallbackLoop):
    """Loop over an `EventQueue`; run that within `running`. What breaks ends the simulation."""

    def __init__(self, queue: EventQueue) -> None:
        super().__init__()
        self._queue = queue
        self._scheduled = False
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        # A task that ends from here on is not restarted.
        self.closing = False

    def begin(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task; what it raises ends the simulation."""
        task = self.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(error)

    @override
    def _broke(self, error: BaseException) -> None:
        self._failure = self._failure or error

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop: what events call may start tasks, and coroutines find their loop."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            yield
        finally:
            events._set_running_loop(before)

    def close(self) -> None:
        """End every task where it stands."""
        self.closing = True
        with self.running():
            for _ in range(MOST_ROUNDS):
                # Whoever is cancelled may cancel others, and wait for them.
                tasks = asyncio.all_tasks(self)
                if not tasks:
                    break
                for task in tasks:
                    task.cancel()
                while self._ready:
                    handle = self._ready.popleft()
                    if not handle.cancelled():
                        handle._run()
        self._failure = None

    def _run_ready(self) -> None:
        self._scheduled = False
        ready = self._ready
        for _ in range(MOST_CALLBACKS):
            if not ready:
                break
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
        else:
            raise RuntimeError("the simulated event loop turns on the spot")
        if self._failure is not None:
            raise self._failure

    # ---- what asyncio asks of a loop ----

    @override
    def time(self) -> float:
        return self._queue.now_ns / NS

    @override
    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon(callback, *args, context=context)
        if not self._scheduled:
            self._scheduled = True
            self._queue.at_ns(self._queue.now_ns, self._run_ready)
        return handle

    @override
    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def due() -> None:
            if not handle.cancelled():
                self._ready.append(handle)
                self._run_ready()

        self._queue.at_ns(round(when * NS), due)
        return handle

    @override
    def is_closed(self) -> bool:
        return False
