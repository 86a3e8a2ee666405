"""Pool of the worker processes, for the gateway's event loop.

run ── a worker is free ──► sent ──► answered: the worker is free again
 │                            └──► late, or the worker died: killed, a new one is begun
 └─ waits, for as long as a job may take; then, or in too long a queue: TextBusy
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from rose.errors import RefusedError
from rose.tokenizer_pool.worker import (
    LENGTH,
    MAX_FRAME_BYTES,
    Chat,
    Decode,
    Done,
    Job,
    ParseTools,
    Refused,
    Setup,
    ToolSetup,
    decode_answer,
    frame,
)

T = TypeVar("T")
TEXT_WORKER = "rose.tokenizer_pool.worker"
TOOL_WORKER = "rose.tokenizer_pool.tool_worker"
WORKERS = 2
MAX_QUEUE = 64
# Larger jobs never have all workers at once, so that short ones pass them.
LARGE_BYTES = 64 << 10
# A worker's Python, its imports (vLLM's are most of it) and the tokenizer, on a busy machine.
START_S = 120.0
RESTART_PAUSE_S = 1.0


class TextRefused(RefusedError):  # noqa: N818 - as RefusedError's other kinds
    """Error: the job itself is at fault: too long, too large, or the template's own complaint."""


class TextBusy(RefusedError):  # noqa: N818 - a state
    """Error: too many texts are waiting; the same job may be done later."""


@dataclass(slots=True, eq=False)
class _Worker:
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class TextPool:
    """Pool of tokenizer worker processes for the gateway; `run` does one job; end with `close`.

    setup: sent to each worker as its first frame. note: called with an event and its fields when a
    worker ends. module: the Python module that the workers run.
    """

    def __init__(
        self,
        setup: Setup | ToolSetup,
        note: Callable[..., None],
        workers: int = WORKERS,
        module: str = TEXT_WORKER,
    ) -> None:
        self._module = module
        self._first = frame(setup)
        self.time_s = setup.time_s
        self._memory_bytes = setup.memory_bytes
        self._note = note
        self._workers = workers
        # None: no worker can be set up, so no job will ever be done.
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()
        self._large = asyncio.Semaphore(max(1, workers - 1))
        self._waiting = 0
        self._alive = 0
        self._unusable = ""
        self._tasks: set[asyncio.Task[object]] = set()
        self._started = self._closed = False

    def start(self) -> None:
        """Start all workers, without waiting for them; a second call does nothing."""
        if not self._started:
            self._started = True
            for _ in range(self._workers):
                self._spawn(self._begin(0.0))

    async def run(self, job: Job) -> Done:
        """Run a job on a free worker and return its answer. Raises TextRefused or TextBusy."""
        self.start()
        async with contextlib.AsyncExitStack() as held:
            worker = await self._take(held, large=_size(job) > LARGE_BYTES)
            # The job of a caller that hangs up is finished: killing would cost more.
            return await asyncio.shield(self._spawn(self._work(job, worker, held.pop_all())))

    async def close(self) -> None:
        """Cancel the running jobs and end all workers."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._idle.empty():
            if (worker := self._idle.get_nowait()) is not None:
                await _end(worker)

    def _spawn(self, work: "asyncio._CoroutineLike[T]") -> "asyncio.Task[T]":
        task: asyncio.Task[T] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The caller may be gone.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    async def _take(self, held: contextlib.AsyncExitStack, *, large: bool) -> _Worker:
        """Wait for a free worker and return it. Raises TextBusy, or TextRefused if unusable.

        A large job also takes a place among large ones, which `held` gives back.
        """
        if self._waiting >= MAX_QUEUE:
            raise TextBusy(f"{self._waiting} texts wait to be tokenized; send it again later")
        self._waiting += 1
        try:
            # The queue is not at fault for workers that are still starting.
            async with asyncio.timeout(self.time_s + START_S * (not self._alive)):
                if large:
                    await held.enter_async_context(self._large)
                worker = await self._idle.get()
        except TimeoutError as error:
            raise TextBusy(
                f"the text was not tokenized within {self.time_s:g} s: others came first; "
                "send it again later"
            ) from error
        finally:
            self._waiting -= 1
        if worker is None:
            self._idle.put_nowait(None)
            raise TextRefused(self._unusable)
        return worker

    async def _begin(self, after_s: float) -> None:
        """Start a worker and add it to the idle ones, with retries until one starts.

        A worker that refuses its setup ends that: the pool is unusable then, and refuses every job.
        """
        while True:
            await asyncio.sleep(after_s)
            worker = await _start(self._module)
            try:
                async with asyncio.timeout(START_S):
                    answer = await _ask(worker, self._first)
            except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
                await _end(worker)
                self._note("text_worker_failed", reason=f"{type(error).__name__}: {error}")
                after_s = RESTART_PAUSE_S
                continue
            except BaseException:
                await _end(worker)
                raise
            if isinstance(answer, Refused):
                await _end(worker)
                self._unusable = answer.message
                self._note("text_worker_failed", reason=answer.message)
                self._idle.put_nowait(None)
                return
            self._alive += 1
            self._idle.put_nowait(worker)
            return

    async def _work(self, job: Job, worker: _Worker, held: contextlib.AsyncExitStack) -> Done:
        answer: Done | Refused | None = None
        async with held:
            try:
                async with asyncio.timeout(self.time_s):
                    answer = await _ask(worker, frame(job))
            except TimeoutError as error:
                raise self._lost(f"takes longer than {self.time_s:g} s") from error
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                megabytes = self._memory_bytes >> 20
                raise self._lost(f"needs more than {megabytes} MiB of memory") from error
            finally:
                await self._free(worker, answer)
        if isinstance(answer, Refused):
            raise TextRefused(answer.message)
        return answer

    def _lost(self, why: str) -> TextRefused:
        self._note("text_worker_lost", reason=why)
        return TextRefused(f"tokenizing this text {why}: send a shorter one")

    async def _free(self, worker: _Worker, answer: Done | Refused | None) -> None:
        """Make the worker idle again; without an answer, or after a last one, replace it."""
        if answer is not None and not (isinstance(answer, Refused) and answer.last):
            self._idle.put_nowait(worker)
            return
        self._alive -= 1
        await _end(worker)
        if not self._closed:
            self._spawn(self._begin(0.0))


async def _start(module: str) -> _Worker:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return _Worker(process, process.stdout, process.stdin)


async def _ask(worker: _Worker, data: bytes) -> Done | Refused:
    """Send a frame and return the decoded answer.

    Raises OSError or EOFError if the worker is gone.
    """
    worker.writer.write(data)
    await worker.writer.drain()
    (size,) = LENGTH.unpack(await worker.reader.readexactly(LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"an answer of {size} bytes")
    return decode_answer(await worker.reader.readexactly(size))


async def _end(worker: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.process.kill()
    worker.writer.close()
    await worker.process.wait()


def _size(job: Job) -> int:
    if isinstance(job, Chat):
        return len(job.messages) + len(job.tools)
    if isinstance(job, Decode | ParseTools):
        return len(job.token_ids)
    return sum(map(len, job.texts))
