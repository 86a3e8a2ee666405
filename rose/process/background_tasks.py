"""Background tasks of a process, none of which dies unnoticed, and an event loop fair to threads.

start ── runs ── ended or raised: event `task_died`, a pause ── runs again
                    └─ more often than allowed: `failed` raises, and the process ends

The fair loop lets the other threads of its process run. A loop with much to do asks for ready
sockets without waiting, over and over. Each time it gives up the interpreter's lock for about a
microsecond, too short for a thread that sleeps until the lock is free, and CPython counts it as
given up: it does not force a hand-over of a lock that was free a moment ago. So a peer that keeps a
loop busy could keep another thread from the lock for half a second.
"""

import asyncio
import logging
import selectors
import time
import traceback
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import RoseError

# As long as CPython lets a thread keep the lock that others wait for.
MOST_WITHOUT_WAIT_S = 0.005
# Several times what a thread takes to wake up on an idle core.
PAUSE_S = 0.0002


class FairSelector(selectors.DefaultSelector):
    """A selector that sleeps `PAUSE_S` once in `MOST_WITHOUT_WAIT_S` if nothing else makes it."""

    def __init__(self) -> None:
        super().__init__()
        self._waited_s = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As of every selector; `timeout` in seconds, None for no end."""
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
    """A new event loop; the caller closes it."""
    return asyncio.SelectorEventLoop(FairSelector())


def run_fairly(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, on a fair loop."""
    with asyncio.Runner(loop_factory=fair_loop) as runner:
        runner.run(main)


FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
RESTARTS = 5
# A task that ran for that long without an end is well: its earlier ends count no more.
STEADY_S = 60.0

Work = Callable[[], Coroutine[Any, Any, object]]
EventSink = Callable[..., object]

_logger = logging.getLogger("rose.process.background_tasks")


class TaskDiedError(RoseError):
    """A background task ended too often: the process cannot do what it is for."""


@dataclass(slots=True)
class _Kept:
    """One task. `restarts` None: for ever. `ending`: it may end."""

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
    """The background tasks of one process, in its event loop. End with `close`."""

    def __init__(self, on_event: EventSink) -> None:
        """`on_event(event, **fields)`: takes `task_died`."""
        self._on_event = on_event
        self._kept: list[_Kept] = []
        self._failure: RoseError | None = None
        self._failed = asyncio.Event()
        self._ending = False

    def start(self, name: str, work: Work, restarts: int | None = RESTARTS) -> None:
        """Run `work()` for as long as the process lives, and again when it ends.

        restarts: so often within STEADY_S of each other, None for ever; then `failed` raises.
        """
        kept = _Kept(name, work, restarts)
        self._kept.append(kept)
        task = asyncio.create_task(self._keep(kept), name=name)
        task.add_done_callback(self._unkept)
        kept.task = task

    async def failed(self) -> None:
        """Return never. Raises the error of the task that was not started again."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def restarted(self) -> dict[str, int]:
        """How often each task was started again (any thread)."""
        return {kept.name: kept.restarted for kept in list(self._kept)}

    def running(self) -> dict[str, bool]:
        """Which tasks run now (any thread)."""
        return {kept.name: kept.running for kept in list(self._kept)}

    def troubles(self) -> list[str]:
        """Tasks that are down or were lately, a line each."""
        since_s = asyncio.get_running_loop().time() - STEADY_S
        return [
            f"task {kept.name} {'was started again' if kept.running else 'is down'}: {kept.why}"
            for kept in self._kept
            if not kept.running or (kept.died and kept.died_s > since_s)
        ]

    def let_end(self, names: Collection[str] | None = None) -> None:
        """From now on these tasks may end, or all, since the process does."""
        self._ending = self._ending or names is None
        for kept in self._kept:
            kept.ending = kept.ending or names is None or kept.name in names

    async def ended(self, name: str, patience_s: float) -> None:
        """Return once a task that may end has ended, or patience is at its end."""
        tasks = [kept.task for kept in self._kept if kept.name == name and kept.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=patience_s)

    async def end(self, names: Collection[str]) -> None:
        """Cancel these tasks, and forget them."""
        self.let_end(names)
        await self._cancel([kept for kept in self._kept if kept.name in names])
        self._kept = [kept for kept in self._kept if kept.name not in names]

    async def close(self) -> None:
        """Cancel all."""
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
        """Whoever was to be told raised: nobody looks after this task any more."""
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
    """Run it to its end; what it raised. Raises CancelledError only when this task is cancelled."""
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
    """An error in a line: what, and where it was raised."""
    if error is None:
        return "it returned"
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
