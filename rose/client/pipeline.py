"""Rollout pipeline: plays episodes over prompts and hands complete groups to the trainer.

    prompts ─► RolloutBuffer (decides starts, voids and steps) ─► take
                  │ StartRun, CancelRun          ▲ finished, failed, stamps
                  └──► tasks: episode(Session) ──┘ ─► gateways

Every token of a group is within the staleness bound, which is enforced here: each turn carries the
oldest acceptable version (`min_version`, the gateway's fence), each answer's version stamps are
checked, and `take` returns only groups that pass.

`BlockingRolloutPipeline` is for trainers without an event loop: episodes run on the client's own
thread.
"""

import asyncio
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from typing import Generic, Protocol, Self, TypeVar, Unpack

from elastic_scheduler import (
    CancelRun,
    RolloutBuffer,
    RolloutProgress,
    SampleRun,
    StepPlan,
    TrainingStep,
    TurnTicket,
)
from rose.client.blocking import BlockingRolloutClient, LoopThread
from rose.client.client import RolloutClient
from rose.client.errors import (
    AnswerBroken,
    ClientClosed,
    GroupsDropped,
    TurnCancelled,
    VersionNotServed,
)
from rose.client.session import Session, TurnSource
from rose.client.stream import ChunkSink, TurnStream
from rose.client.types import TokenChunk, Turn, TurnOptions
from rose.contract.replica import Sampling

P = TypeVar("P")
T = TypeVar("T")


class PipelineTurns(Generic[P, T]):
    """Source of turns for one run of an episode, whose turns must be new enough to be trained on.

    Each turn carries the oldest acceptable policy version, and the versions of its answer are
    recorded. After the run became void every turn raises TurnCancelled.
    """

    def __init__(
        self,
        source: TurnSource,
        buffer: RolloutBuffer[P, T],
        run: SampleRun,
        every: TurnOptions,
        changed: Callable[[], None],
    ) -> None:
        """Bind the source to one run.

        every: options that all turns get. changed: called when an answer's version made the group
        void.
        """
        self._source = source
        self._buffer = buffer
        self._run = run
        self._every = every
        self._changed = changed

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Turn:
        """Generate a turn, record the oldest version of its tokens for its group, and return it.

        Raises TurnCancelled if the group is void, AnswerBroken for tokens older than requested.
        """
        ticket = self._begin()
        try:
            fenced = self._fenced(options, ticket)
            turn = await self._source.generate(token_ids, sampling, **fenced)
            if turn.token_ids:
                self._stamp(ticket, _oldest_version(turn))
        finally:
            self._buffer.end_turn(self._run, ticket.number)
        return turn

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> TurnStream:
        """Return one turn as a stream, which records each chunk's oldest version for its group."""

        async def run(sink: ChunkSink) -> Turn:
            ticket = self._begin()

            async def stamped(chunk: TokenChunk) -> None:
                if chunk.token_ids:
                    kept = chunk.oldest_version
                    self._stamp(ticket, chunk.version if kept is None else kept)
                await sink(chunk)

            try:
                fenced = self._fenced(options, ticket)
                return await self._source.stream(token_ids, sampling, **fenced).into(stamped)
            finally:
                self._buffer.end_turn(self._run, ticket.number)

        return TurnStream(run)

    def _begin(self) -> TurnTicket:
        ticket = self._buffer.begin_turn(self._run)
        if ticket is None:
            raise TurnCancelled(f"the group of {self._run.name} is void: it starts anew")
        return ticket

    def _fenced(self, options: TurnOptions, ticket: TurnTicket) -> TurnOptions:
        """Return the options with `min_version` at least the oldest version to be trained on.

        Raises VersionNotServed if `exact_version` is older than that.
        """
        exact = options.get("exact_version")
        if exact is None:
            newest = max(ticket.min_version, options.get("min_version") or 0)
            return {**self._every, **options, "min_version": newest}
        if exact < ticket.min_version:
            raise VersionNotServed(
                f"exact_version {exact} would be too old to be trained on:"
                f" {ticket.min_version} is the oldest that is not"
            )
        return {**self._every, **options}

    def _stamp(self, ticket: TurnTicket, version: int) -> None:
        if version < ticket.min_version:
            said = f"version {version}" if version >= 0 else "no version"
            raise AnswerBroken(
                f"tokens of {said} came though {ticket.min_version} or newer was asked for:"
                " use gateways and replicas of ROSE where staleness is bounded"
            )
        alive = self._buffer.stamp(self._run, ticket.number, version)
        if not alive:
            self._changed()
            raise TurnCancelled(f"the group of {self._run.name} aged out: it starts anew")


def _oldest_version(turn: Turn) -> int:
    """Return the oldest policy version of a turn's tokens and KV; -1 if a token has no version."""
    stamped = sum(end - start for _, start, end in turn.versions)
    oldest = turn.oldest_version
    return -1 if oldest is None or stamped < len(turn.token_ids) else oldest


P_in = TypeVar("P_in", contravariant=True)
T_out = TypeVar("T_out", covariant=True)


class EpisodeFunction(Protocol[P_in, T_out]):
    """Async function that plays one trajectory, with any number of turns, all through `session`."""

    def __call__(self, session: Session, prompt: P_in, sample: int, /) -> Awaitable[T_out]:
        """Play one trajectory of `prompt` and return the result that the trainer gets.

        sample: number of the trajectory within the prompt's group, from 0.
        """
        ...


class RolloutPipeline(Generic[P, T]):
    """Pipeline that plays episodes over prompts and gives the trainer complete groups.

    Use it as an async context manager; see docs/client.md. Every prompt is trained on once or
    returned as dropped. Leaving the block cancels all turns at the gateways and finishes all
    sessions.
    """

    def __init__(
        self,
        client: RolloutClient,
        episode: EpisodeFunction[P, T],
        prompts: Iterable[P] | AsyncIterable[P],
        plan: StepPlan,
        *,
        version: int = 0,
    ) -> None:
        """Create the pipeline; entering it starts the episodes.

        prompts: drawn one by one, when they can start. plan: groups of a step and the staleness
        bound. version: the newest published policy version at the start.
        """
        self._client = client
        self._episode = episode
        self._prompts = prompts
        self._buffer = RolloutBuffer[P, T](plan, version)
        # Gateways remember request ids: another run of the same trainer must not get its answers.
        self._name = uuid.uuid4().hex[:12]
        self._news = asyncio.Event()
        self._tasks: dict[SampleRun, asyncio.Task[T]] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._drawing: asyncio.Task[None] | None = None
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        self._drawing = asyncio.create_task(self._draw())
        return self

    async def __aexit__(self, *_: object) -> None:
        leaving = asyncio.ensure_future(self._leave())
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            # A cancelled caller still waits for this; a second cancel ends the wait.
            await leaving
            raise

    async def _leave(self) -> None:
        """Cancel the running episodes, and wait until their sessions' ends are reported."""
        self._open = False
        self._news.set()
        ending = [*self._tasks.values(), *([self._drawing] if self._drawing else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*self._finishing, return_exceptions=True)

    async def take(self, *, part: bool = False) -> TrainingStep[P, T] | None:
        """Wait for the next training step and return it; None when no prompts are left.

        The step must be trained from policy version `step.version`, before a newer one is
        published. part: wait for any of its groups, and return those that are complete; the rest
        follows by later calls until `step.last`. Raises GroupsDropped if a whole step's worth of
        groups failed meanwhile (the next step has them: call again to continue), ClientClosed
        outside the block, and at the end the error that `prompts` raised.
        """
        while True:
            if not self._open:
                raise ClientClosed("use `async with RolloutPipeline(...)`: it is not open now")
            step = self._buffer.take(part=part)
            trouble = None if step is not None else self._buffer.trouble()
            self._act()
            if step is not None:
                return step
            if self._buffer.exhausted and self._drawing is not None:
                await self._drawing
                return None
            if trouble is not None:
                raise GroupsDropped(
                    "a whole step's worth of groups was dropped, the last one because of"
                    f" {type(trouble.error).__name__}: {trouble.error}"
                ) from trouble.error
            self._news.clear()
            await self._news.wait()

    def __aiter__(self) -> AsyncIterator[TrainingStep[P, T]]:
        return self

    async def __anext__(self) -> TrainingStep[P, T]:
        """Return the next training step; the iteration ends when no prompts are left."""
        step = await self.take()
        if step is None:
            raise StopAsyncIteration
        return step

    def publish(self, version: int) -> None:
        """Record that the trainer published `version`; groups too old for it start anew.

        Their running turns are cancelled. Raises ValueError for a version older than the last.
        """
        self._buffer.publish(version)
        self._act()

    def progress(self) -> RolloutProgress:
        """Return the state of all groups, and counts since the pipeline was created."""
        return self._buffer.progress()

    async def _draw(self) -> None:
        """Draw prompts one by one into the buffer, each when it can start, until none is left."""
        try:
            async with aclosing(_as_async(self._prompts)) as source:
                await self._wanted()
                async for prompt in source:
                    self._buffer.add(prompt)
                    self._act()
                    await self._wanted()
        finally:
            self._buffer.end()
            self._act()

    async def _wanted(self) -> None:
        """Wait until the buffer can start another prompt."""
        while self._buffer.wanted < 1:
            self._news.clear()
            await self._news.wait()

    def _act(self) -> None:
        """Start and cancel episodes as the buffer decides, and wake all waiting callers."""
        for action in self._buffer.actions() if self._open else ():
            if isinstance(action, CancelRun):
                self._tasks[action.run].cancel()
            else:
                told = self._client.session(f"{self._name}/{action.run.name}")
                task = asyncio.create_task(self._play(action.run, told))
                self._tasks[action.run] = task
                task.add_done_callback(partial(self._over, action.run, told))
        self._news.set()

    async def _play(self, run: SampleRun, told: Session) -> T:
        every: TurnOptions = {"group_id": f"{self._name}/{run.group}"}
        turns = PipelineTurns(self._client, self._buffer, run, every, self._act)
        session = Session(turns, told.id, _told_outside)
        return await self._episode(session, self._buffer.prompt_of(run), run.sample)

    def _over(self, run: SampleRun, told: Session, task: asyncio.Task[T]) -> None:
        """Report an ended episode to the buffer; finish its session in a task of its own.

        Nothing cancels that task.
        """
        del self._tasks[run]
        finishing = asyncio.create_task(told.finish())
        self._finishing.add(finishing)
        finishing.add_done_callback(self._finishing.discard)
        if task.cancelled():
            self._buffer.failed(run, TurnCancelled(f"episode {run.name} was cancelled"))
        elif (error := task.exception()) is not None:
            self._buffer.failed(run, error)
        else:
            self._buffer.finished(run, task.result())
        self._act()


async def _told_outside(session_id: str, job: str) -> None:
    """Do nothing: the pipeline itself finishes the session, once its episode is over."""


async def _as_async(prompts: Iterable[P] | AsyncIterable[P]) -> AsyncGenerator[P, None]:
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prompt
    else:
        for prompt in prompts:
            yield prompt


class BlockingRolloutPipeline(Generic[P, T]):
    """Blocking form of `RolloutPipeline`: a plain context manager.

    `episode` stays an async function. Episodes continue while the trainer's thread computes. Any
    thread may call the methods.
    """

    def __init__(
        self,
        client: BlockingRolloutClient,
        episode: EpisodeFunction[P, T],
        prompts: Iterable[P] | AsyncIterable[P],
        plan: StepPlan,
        *,
        version: int = 0,
    ) -> None:
        """Create the pipeline; the arguments are those of `RolloutPipeline`.

        `prompts` are drawn on the client's thread.
        """
        self._client = client
        self._settings = (episode, prompts, plan, version)
        self._loop: LoopThread | None = None

    def __enter__(self) -> Self:
        episode, prompts, plan, version = self._settings
        source, self._loop = self._client.on_loop()
        self._pipeline = RolloutPipeline(source, episode, prompts, plan, version=version)
        self._loop.call(self._pipeline.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and loop.alive:
            loop.call(self._pipeline.__aexit__(None, None, None))

    def take(self, *, part: bool = False) -> TrainingStep[P, T] | None:
        """Wait for the next training step and return it; None when no prompts are left.

        See `RolloutPipeline.take` for parts of a step, and for the errors.
        """
        return self._opened().call(self._pipeline.take(part=part))

    def __iter__(self) -> Iterator[TrainingStep[P, T]]:
        while (step := self.take()) is not None:
            yield step

    def publish(self, version: int) -> None:
        """Record that the trainer published `version`; cancel the groups too old for it."""

        async def publish() -> None:
            self._pipeline.publish(version)

        self._opened().call(publish())

    def progress(self) -> RolloutProgress:
        """Return the state of all groups, and counts since the pipeline was created."""

        async def progress() -> RolloutProgress:
            return self._pipeline.progress()

        return self._opened().call(progress())

    def _opened(self) -> LoopThread:
        if self._loop is None:
            raise ClientClosed("use `with BlockingRolloutPipeline(...)`: it is not open now")
        return self._loop
