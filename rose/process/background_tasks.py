"""Background tasks of a process, restarted when they end, and an event loop fair to threads.

start ── runs ── ended or raised: event `task_died`, a pause ── runs again
                    └─ more often than allowed: `failed` raises, and the process ends

The fair loop lets the other threads of its process run. A busy loop asks for ready sockets
without waiting, over and over. Each time it releases the interpreter's lock for about a
microsecond, too short for a thread that sleeps until the lock is free, and CPython counts the
release: it does not force a hand-over of a lock that was free a moment ago. So a peer that keeps
a loop busy could keep another thread from the lock for half a second.
"""

import asyncio
import logging
import selectors
import signal
import time
import traceback
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import RoseError

# CPython's switch interval: the time for which a thread may keep the lock while others wait.
MOST_WITHOUT_WAIT_S = 0.005
# Several times the time that a thread takes to wake up on an idle core.
PAUSE_S = 0.0002


class FairSelector(selectors.DefaultSelector):
    """Selector that sleeps PAUSE_S if it did not wait for MOST_WITHOUT_WAIT_S.

    Other threads get the interpreter's lock then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waited_s = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        before_s = time.monotonic()
        if timeout is not None and timeout <= 0:
            if before_s - self._waited_s >= MOST_WITHOUT_WAIT_S:
                time.sleep(PAUSE_S)
                self._waited_s = time.monotonic()
            return super().select(timeout)
        ready = super().select(timeout)
        after_s = time.monotonic()
        if after_s - before_s >= PAUSE_S:
            self._waited_s = after_s
        return ready


def fair_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop that lets other threads run; the caller closes it."""
    return asyncio.SelectorEventLoop(FairSelector())


def run_fairly(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end like `asyncio.run`, on a fair loop."""
    with asyncio.Runner(loop_factory=fair_loop) as runner:
        runner.run(main)


FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
RESTARTS = 5
# A task that ran for this long is steady: its earlier ends no longer count.
STEADY_S = 60.0

Work = Callable[[], Coroutine[Any, Any, object]]
EventSink = Callable[..., object]

_logger = logging.getLogger("rose.process.background_tasks")


def stop_signalled() -> asyncio.Event:
    """Return an asyncio event that SIGTERM and SIGINT set from now on."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


class TaskDiedError(RoseError):
    """Error: a background task ended too often, so the process cannot do its work."""


@dataclass(slots=True)
class _Kept:
    """One background task. `restarts`: bound, None for none. `ending`: it may end now.

    `died`: ends in a row, each soon after the last; `why`: the last error, as one line.
    """

    name: str
    work: Work
    restarts: int | None
    died: int = 0
    restarted: int = 0
    died_s: float = 0.0
    why: str = ""
    running: bool = True
    ending: bool = False
    task: "asyncio.Task[None] | None" = None


class Background:
    """Background tasks of one process, restarted when they end; end them with `close`."""

    def __init__(self, on_event: EventSink) -> None:
        """Create the object without a task.

        on_event: called as `on_event("task_died", **fields)` whenever a task ends by itself.
        """
        self._on_event = on_event
        self._kept: list[_Kept] = []
        self._failure: RoseError | None = None
        self._failed = asyncio.Event()
        self._ending = False

    def start(self, name: str, work: Work, restarts: int | None = RESTARTS) -> None:
        """Start a task that runs `work()`, and runs it again, after a pause, whenever it ends.

        restarts: bound on ends in a row, each within STEADY_S of the start before; beyond it
        `failed` raises. None for no bound.
        """
        kept = _Kept(name, work, restarts)
        self._kept.append(kept)
        task = asyncio.create_task(self._keep(kept), name=name)
        task.add_done_callback(self._unkept)
        kept.task = task

    async def failed(self) -> None:
        """Wait until a task has ended too often, then raise its error; never return."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def restarted(self) -> dict[str, int]:
        """Return the number of restarts by task name; for any thread."""
        return {kept.name: kept.restarted for kept in list(self._kept)}

    def running(self) -> dict[str, bool]:
        """Return by task name whether the task runs now; for any thread."""
        return {kept.name: kept.running for kept in list(self._kept)}

    def troubles(self) -> list[str]:
        """Return one line for each task that is down, or ended within the last STEADY_S."""
        since_s = asyncio.get_running_loop().time() - STEADY_S
        return [
            f"task {kept.name} {'was started again' if kept.running else 'is down'}: {kept.why}"
            for kept in self._kept
            if not kept.running or (kept.died and kept.died_s > since_s)
        ]

    def let_end(self, names: Collection[str] | None = None) -> None:
        """Do not restart these tasks, by name, when they end; None for all tasks."""
        self._ending = self._ending or names is None
        for kept in self._kept:
            kept.ending = kept.ending or names is None or kept.name in names

    async def ended(self, name: str, patience_s: float) -> None:
        """Wait until the tasks of that name have ended, `patience_s` at most.

        Call it after `let_end`, since otherwise a task is restarted.
        """
        tasks = [kept.task for kept in self._kept if kept.name == name and kept.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=patience_s)

    async def end(self, names: Collection[str]) -> None:
        """Cancel these tasks, by name, wait for their ends, and forget them."""
        self.let_end(names)
        await self._cancel([kept for kept in self._kept if kept.name in names])
        self._kept = [kept for kept in self._kept if kept.name not in names]

    async def close(self) -> None:
        """Cancel all tasks and wait for their ends."""
        self.let_end()
        await self._cancel(self._kept)

    async def _cancel(self, ended: Collection[_Kept]) -> None:
        tasks = [kept.task for kept in ended if kept.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, kept: _Kept) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            kept.running = True
            error = await _end_of(kept.work)
            kept.running = False
            if self._ending or kept.ending:
                return
            kept.died = 1 if loop.time() - began_s >= STEADY_S else kept.died + 1
            kept.died_s, kept.why = loop.time(), described(error)
            if kept.restarts is not None and kept.died > kept.restarts:
                self._give_up(kept, error)
                return
            pause_s = min(FIRST_PAUSE_S * 2 ** min(kept.died - 1, 16), MAX_PAUSE_S)
            _logger.warning("%s ended (%s): again in %.1f s", kept.name, kept.why, pause_s)
            self._on_event("task_died", task=kept.name, message=kept.why, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            kept.restarted += 1

    def _unkept(self, task: "asyncio.Task[None]") -> None:
        """Make `failed` raise if the restarting itself raised, as when `on_event` does."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = TaskDiedError(f"{task.get_name()} ended ({described(error)})")
            self._failed.set()

    def _give_up(self, kept: _Kept, error: BaseException | None) -> None:
        self._on_event("task_died", task=kept.name, message=kept.why, again_in_s=None)
        if self._failure is None:
            self._failure = (
                error
                if isinstance(error, RoseError)
                else TaskDiedError(f"{kept.name} ended ({kept.why}); start the process again")
            )
        self._failed.set()


async def _end_of(work: Work) -> BaseException | None:
    """Run the work to its end; return its error, None without one.

    Raises CancelledError if the calling task is cancelled.
    """
    try:
        await work()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return error
    except Exception as error:  # noqa: BLE001 - whatever ends a task: it is told, and bounded
        return error
    return None


def described(error: BaseException | None) -> str:
    """Return an error as one line with its place in the code; "it returned" for None."""
    if error is None:
        return "it returned"
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
