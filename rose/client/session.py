"""One trajectory: turns that share a prefix, and the word that there are no more of them."""

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, Unpack

from rose.client.options import SessionOptions, TurnOptions
from rose.client.stream import TurnStream
from rose.client.turn import Sampling, Turn


class TurnSource(Protocol):
    """The part of a client that a session needs."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Turn:
        """One whole turn."""
        ...

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> TurnStream:
        """One streamed turn."""
        ...


class Session:
    """`async with client.session() as session: await session.generate(…)`.

    All its turns carry `X-Session-ID`; its end tells the gateways, which then forget its prefix.
    Request ids are the session's id and the number of the turn, unless given.
    """

    def __init__(
        self,
        source: TurnSource,
        session_id: str,
        finish: Callable[[str], Awaitable[None]],
        group_id: str = "",
    ) -> None:
        self.id = session_id
        self._group_id = group_id
        self._source = source
        self._finish = finish
        self._turns = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.finish()

    async def finish(self) -> None:
        """Tell the gateways that there are no more turns, as leaving the block does."""
        await self._finish(self.id)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[SessionOptions]
    ) -> Turn:
        """The next turn of the trajectory; as `RolloutClient.generate`."""
        return await self._source.generate(token_ids, sampling, **self._next(options))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[SessionOptions]
    ) -> TurnStream:
        """The next turn of the trajectory; as `RolloutClient.stream`."""
        return self._source.stream(token_ids, sampling, **self._next(options))

    def _next(self, options: SessionOptions) -> TurnOptions:
        self._turns += 1
        request_id = options.get("request_id") or f"{self.id}/{self._turns}"
        names: TurnOptions = {"session_id": self.id, "group_id": self._group_id}
        return {**options, "request_id": request_id, **names}
