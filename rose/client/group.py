"""A group: n samples of one prompt, handed out as they finish; what nobody waits for is ended."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rose.client.errors import ClientClosed, RolloutError
from rose.client.turn import Turn


@dataclass(frozen=True, slots=True)
class Member:
    """One sample of a group: its turn, or why there is none."""

    index: int
    turn: Turn | None
    error: RolloutError | None


class Group:
    """`async with client.gather_group(…) as group: async for member in group: …`.

    The iteration ends with all members, or with `need` turns; leaving the block cancels the rest.
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._index:
            task.cancel()
        await asyncio.gather(*self._index, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Member:
        """The next member to finish."""
        if not self._index:
            raise ClientClosed("use `async with client.gather_group(...) as group` first")
        if self._out == len(self._index) or self._turns >= self._need:
            raise StopAsyncIteration
        member = self._member(await self._done.get())
        self._out += 1
        self._turns += member.turn is not None
        return member

    def _member(self, task: asyncio.Task[Turn]) -> Member:
        """Raises what a member raised other than RolloutError: that is a fault of this program."""
        try:
            return Member(self._index[task], task.result(), None)
        except RolloutError as error:
            return Member(self._index[task], None, error)
