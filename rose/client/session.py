"""Groups and sessions: n samples of one prompt, and the turns of one trajectory.

A group yields samples as they finish and cancels the rest when its reader leaves. A session's turns
share a prefix; its end tells the gateways that no more of them come.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, Unpack

from rose.client.errors import ClientClosed, RolloutError
from rose.client.stream import TurnStream
from rose.client.types import SessionOptions, Turn, TurnOptions
from rose.contract.replica import Sampling


@dataclass(frozen=True, slots=True)
class Member:
    """One sample of a group: its index and its turn, or the error in place of the turn."""

    index: int
    turn: Turn | None
    error: RolloutError | None


class Group:
    """Running samples of one prompt, yielded as they finish: `async for member in group`.

    Use it as an async context manager: entering starts all members. The iteration ends after all
    members, or after `need` whole turns; leaving the block cancels the others.
    """

    def __init__(
        self, start: Callable[[int], Coroutine[Any, Any, Turn]], members: int, need: int
    ) -> None:
        self._start = start
        self._members = members
        self._need = need
        self._done: asyncio.Queue[asyncio.Task[Turn]] = asyncio.Queue()
        self._out = self._turns = 0
        self._index: dict[asyncio.Task[Turn], int] = {}

    async def __aenter__(self) -> Self:
        for index in range(self._members):
            task = asyncio.create_task(self._start(index))
            self._index[task] = index
            task.add_done_callback(self._done.put_nowait)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._index:
            task.cancel()
        await asyncio.gather(*self._index, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Member:
        """Return the next member that finishes, whole or failed.

        The iteration ends after all members, or `need` whole turns.
        """
        if not self._index:
            raise ClientClosed("use `async with client.gather_group(...) as group` first")
        if self._out == len(self._index) or self._turns >= self._need:
            raise StopAsyncIteration
        member = self._member(await self._done.get())
        self._out += 1
        self._turns += member.turn is not None
        return member

    def _member(self, task: asyncio.Task[Turn]) -> Member:
        """Return the member of an ended task; raise an error that is not a RolloutError."""
        try:
            return Member(self._index[task], task.result(), None)
        except RolloutError as error:
            return Member(self._index[task], None, error)


class TurnSource(Protocol):
    """Interface of the part of a client that a session uses to generate turns."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Turn:
        """Generate one turn and return it whole."""
        ...

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> TurnStream:
        """Return a stream of one turn's chunks."""
        ...


class Session:
    """Session of one trajectory: turns that share a prefix and one `X-Session-ID`.

    They go to the same replica. Use the session as an async context manager: its end tells the
    gateways, which then forget it. A turn's request id is the session's id and the turn's number,
    unless the caller gives one.
    """

    def __init__(
        self,
        source: TurnSource,
        session_id: str,
        finish: Callable[[str, str], Awaitable[None]],
        group_id: str = "",
    ) -> None:
        self.id = session_id
        self._group_id = group_id
        self._source = source
        self._finish = finish
        self._turns = 0
        # The jobs that its turns named: usually one.
        self._jobs: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish()

    async def finish(self) -> None:
        """Report to the gateways that no more turns come; leaving the block does the same."""
        for job in sorted(self._jobs or {""}):
            await self._finish(self.id, job)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[SessionOptions]
    ) -> Turn:
        """Generate the trajectory's next turn and return it whole; see `RolloutClient.generate`."""
        return await self._source.generate(token_ids, sampling, **self._next(options))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[SessionOptions]
    ) -> TurnStream:
        """Return a stream of the trajectory's next turn; see `RolloutClient.stream`."""
        return self._source.stream(token_ids, sampling, **self._next(options))

    def _next(self, options: SessionOptions) -> TurnOptions:
        self._turns += 1
        self._jobs.add(options.get("job", ""))
        request_id = options.get("request_id") or f"{self.id}/{self._turns}"
        names: TurnOptions = {"session_id": self.id, "group_id": self._group_id}
        return {**options, "request_id": request_id, **names}
