"""The pipeline for trainers without an event loop: episodes run on the client's own thread."""

from collections.abc import AsyncIterable, Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from elastic_scheduler import FeedProgress, StepPlan, TrainingStep
from rose.client.blocking import BlockingRolloutClient
from rose.client.errors import ClientClosed
from rose.client.loop_thread import LoopThread
from rose.client.pipeline import EpisodeFunction, RolloutPipeline

P = TypeVar("P")
T = TypeVar("T")


class BlockingRolloutPipeline(Generic[P, T]):
    """`RolloutPipeline` as a plain context manager; `episode` stays an async function.

    Episodes go on while the trainer's thread computes. Any thread may call its methods.
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
        """As `RolloutPipeline`. `prompts` are drawn on the client's thread."""
        self._client = client
        self._settings = (episode, prompts, plan, version)
        self._loop: LoopThread | None = None

    def __enter__(self) -> Self:
        episode, prompts, plan, version = self._settings
        source, self._loop = self._client.on_loop()
        self._pipeline = RolloutPipeline(source, episode, prompts, plan, version=version)
        self._loop.call(self._pipeline.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and loop.alive:
            loop.call(self._pipeline.__aexit__(None, None, None))

    def take(self) -> TrainingStep[P, T] | None:
        """As `RolloutPipeline.take`."""
        return self._opened().call(self._pipeline.take())

    def __iter__(self) -> Iterator[TrainingStep[P, T]]:
        while (step := self.take()) is not None:
            yield step

    def publish(self, version: int) -> None:
        """As `RolloutPipeline.publish`; groups that are too old are cancelled when it returns."""

        async def publish() -> None:
            self._pipeline.publish(version)

        self._opened().call(publish())

    def progress(self) -> FeedProgress:
        """As `RolloutPipeline.progress`."""

        async def progress() -> FeedProgress:
            return self._pipeline.progress()

        return self._opened().call(progress())

    def _opened(self) -> LoopThread:
        if self._loop is None:
            raise ClientClosed("use `with BlockingRolloutPipeline(...)`: it is not open now")
        return self._loop
