"""One object between prompts and a trainer: complete groups, each token within the bound.

    prompts ─► GroupFeed (what starts, what is void, what is a step) ─► take
                  │ StartRun, CancelRun          ▲ finished, failed, stamps
                  └──► tasks: episode(Session) ──┘ ─► gateways

Where staleness is enforced: every turn says the oldest version that is of use (`min_version`, the
gateway's fence), and every answer's stamps are looked at here; `take` hands out nothing else.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Iterable
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from elastic_scheduler import (
    CancelRun,
    FeedProgress,
    GroupFeed,
    SampleRun,
    StepPlan,
    TrainingStep,
)
from rose.client.errors import ClientClosed, GroupsDropped, TurnCancelled
from rose.client.options import TurnOptions
from rose.client.pipeline_turns import PipelineTurns
from rose.client.session import Session, TurnSource

P = TypeVar("P")
T = TypeVar("T")
P_in = TypeVar("P_in", contravariant=True)
T_out = TypeVar("T_out", covariant=True)


class SessionSource(TurnSource, Protocol):
    """The part of `RolloutClient` that a pipeline needs."""

    def session(self, session_id: str = "") -> Session:
        """A trajectory."""
        ...


class EpisodeFunction(Protocol[P_in, T_out]):
    """Plays one trajectory: any number of turns through `session`, and only through it."""

    def __call__(self, session: Session, prompt: P_in, sample: int, /) -> Awaitable[T_out]:
        """`sample` counts from 0 within the prompt's group."""
        ...


class RolloutPipeline(Generic[P, T]):
    """`async with RolloutPipeline(client, episode, prompts, plan) as pipeline`: see docs/client.md.

    Every prompt is trained on once or handed out as dropped. Leaving the block cancels all turns at
    the gateways and finishes all sessions.
    """

    def __init__(
        self,
        client: SessionSource,
        episode: EpisodeFunction[P, T],
        prompts: Iterable[P] | AsyncIterable[P],
        plan: StepPlan,
        *,
        version: int = 0,
    ) -> None:
        """`prompts` are drawn as they can be started. `version`: the newest one at the start."""
        self._client = client
        self._episode = episode
        self._prompts = prompts
        self._feed = GroupFeed[P, T](plan, version)
        # Gateways remember request ids: another run of the same trainer must not meet its answers.
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leaving = asyncio.ensure_future(self._leave())
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            # Whoever has no patience left waits for this nevertheless; the second time it ends.
            await leaving
            raise

    async def _leave(self) -> None:
        """End what runs, then tell the gateways."""
        self._open = False
        self._news.set()
        ending = [*self._tasks.values(), *([self._drawing] if self._drawing else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*self._finishing, return_exceptions=True)

    async def take(self) -> TrainingStep[P, T] | None:
        """The groups of the next step, as soon as there are enough; None: the prompts are used up.

        The step is to be trained from `step.version`, before a newer one is published. Raises
        GroupsDropped when a whole step's worth of groups failed meanwhile (they are handed out
        with the next step, take again to go on), and at the end what `prompts` raised, if it did.
        """
        while True:
            if not self._open:
                raise ClientClosed("use `async with RolloutPipeline(...)`: it is not open now")
            step = self._feed.take()
            trouble = None if step is not None else self._feed.trouble()
            self._act()
            if step is not None:
                return step
            if self._feed.exhausted and self._drawing is not None:
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
        """As `take`; ends when the prompts are used up."""
        step = await self.take()
        if step is None:
            raise StopAsyncIteration
        return step

    def publish(self, version: int) -> None:
        """A newer version is out: groups that are too old for it are cancelled and start anew.

        Raises ValueError for one older than the last.
        """
        self._feed.publish(version)
        self._act()

    def progress(self) -> FeedProgress:
        """Where everything is, and counts since the start."""
        return self._feed.progress()

    async def _draw(self) -> None:
        """Take prompts one by one, when they can start."""
        try:
            async with aclosing(_as_async(self._prompts)) as source:
                await self._wanted()
                async for prompt in source:
                    self._feed.add(prompt)
                    self._act()
                    await self._wanted()
        finally:
            self._feed.end()
            self._act()

    async def _wanted(self) -> None:
        """Until another prompt could start."""
        while self._feed.wanted < 1:
            self._news.clear()
            await self._news.wait()

    def _act(self) -> None:
        """Carry out what the feed decided, and let everybody who waits look again."""
        for action in self._feed.actions() if self._open else ():
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
        turns = PipelineTurns(self._client, self._feed, run, every, self._act)
        session = Session(turns, told.id, _told_outside)
        return await self._episode(session, self._feed.prompt_of(run), run.sample)

    def _over(self, run: SampleRun, told: Session, task: asyncio.Task[T]) -> None:
        """An episode ended. Its session is finished apart from it: nothing cancels that."""
        del self._tasks[run]
        finishing = asyncio.create_task(told.finish())
        self._finishing.add(finishing)
        finishing.add_done_callback(self._finishing.discard)
        if task.cancelled():
            self._feed.failed(run, TurnCancelled(f"episode {run.name} was cancelled"))
        elif (error := task.exception()) is not None:
            self._feed.failed(run, error)
        else:
            self._feed.finished(run, task.result())
        self._act()


async def _told_outside(session_id: str) -> None:
    """The pipeline tells the end of a session, once its episode is over."""


async def _as_async(prompts: Iterable[P] | AsyncIterable[P]) -> AsyncGenerator[P, None]:
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prompt
    else:
        for prompt in prompts:
            yield prompt
