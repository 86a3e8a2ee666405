"""Virtual clock: the queue of a simulation's events, and an event loop of asyncio on it.

    event ──► callback ──► all tasks that become ready by it, at the same virtual time

The queue is the only clock; of events at one time the first added goes first. The loop runs the
gateway's own coroutines, which take no virtual time: nothing here waits, and no thread is used.
"""

import asyncio
import heapq
from abc import abstractmethod
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final

from typing_extensions import override

NS: Final = 1_000_000_000
Call = Callable[[], object]
# Most callbacks at one virtual time: a loop that never advances the clock is a bug.
MOST_CALLBACKS = 2_000_000
MOST_ROUNDS = 16


class Entry:
    """Event that waits in an EventQueue. call: what runs when it is due, None after `cancel`."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        """Cancel the event: the queue skips it when it is due."""
        self.call = None


class EventQueue:
    """Queue that runs calls in the order of their virtual times, in nanoseconds from 0; at one time
    the first added goes first.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        self._number = 0
        self._heap: list[tuple[int, int, Entry]] = []
        self._stopped = False

    @property
    def now_s(self) -> float:
        """Seconds of the virtual clock since the beginning."""
        return self.now_ns / NS

    def at_ns(self, time_ns: int, call: Call) -> Entry:
        """Schedule `call` at a time, or now if that is past; return the entry, which can be
        cancelled.
        """
        self._number += 1
        due_ns = time_ns if time_ns > self.now_ns else self.now_ns
        entry = Entry(call)
        heapq.heappush(self._heap, (due_ns, self._number, entry))
        return entry

    def after_s(self, delay_s: float, call: Call) -> Entry:
        """Schedule `call` so many seconds from now; return the entry, which can be cancelled."""
        return self.at_ns(self.now_ns + round(delay_s * NS), call)

    def every_s(self, period_s: float, call: Call, offset_s: float = 0.0) -> None:
        """Schedule `call` every `period_s` seconds, first after `offset_s` and a period."""
        period_ns = max(1, round(period_s * NS))

        def again() -> None:
            call()
            self.at_ns(self.now_ns + period_ns, again)

        self.at_ns(self.now_ns + period_ns + round(offset_s * NS), again)

    def run(self, until_s: float) -> None:
        """Run events in order until the virtual time `until_s`, until none is left, or until `stop`
        is called.
        """
        heap, until_ns, pop = self._heap, round(until_s * NS), heapq.heappop
        self._stopped = False
        while heap and not self._stopped:
            if heap[0][0] > until_ns:
                self.now_ns = until_ns
                return
            due_ns, _, entry = pop(heap)
            call = entry.call
            if call is None:
                continue
            self.now_ns = due_ns
            self.events += 1
            call()

    def stop(self) -> None:
        """Make the queue's `run` return after the event that runs now."""
        self._stopped = True


class CallbackLoop(asyncio.AbstractEventLoop):
    """asyncio event loop without clock or sockets; a subclass gives the time and runs the ready
    callbacks.
    """

    def __init__(self) -> None:
        self._ready: deque[asyncio.Handle] = deque()

    @abstractmethod
    def _broke(self, error: BaseException) -> None:
        """Handle an exception that a callback raised outside of any task."""

    @override
    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    @override
    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    @override
    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    @override
    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self, name=name, context=context)

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and error is not None:
            self._broke(error)

    @override
    def get_debug(self) -> bool:
        return False

    @override
    def is_running(self) -> bool:
        return True

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when it is due."""


class VirtualLoop(CallbackLoop):
    """asyncio event loop on an EventQueue, which is run within `running`.

    An error in a task or callback ends the simulation.
    """

    def __init__(self, queue: EventQueue) -> None:
        super().__init__()
        self.queue = queue
        self._scheduled = False
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        # A task that ends from here on is not restarted.
        self.closing = False

    def begin(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task and return it; an exception that it raises ends the simulation."""
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
        """Make this asyncio's running loop within the block, so that events can start tasks."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            yield
        finally:
            events._set_running_loop(before)

    def close(self) -> None:
        """Cancel every task of the loop and let the cancelled tasks end."""
        self.closing = True
        with self.running():
            for _ in range(MOST_ROUNDS):
                # A cancelled task may cancel other tasks, and wait for them.
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
        return self.queue.now_ns / NS

    @override
    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon(callback, *args, context=context)
        if not self._scheduled:
            self._scheduled = True
            self.queue.at_ns(self.queue.now_ns, self._run_ready)
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

        self.queue.at_ns(round(when * NS), due)
        return handle

    @override
    def is_closed(self) -> bool:
        return False
