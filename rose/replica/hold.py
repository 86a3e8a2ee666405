"""Hold: turns that would begin while a version changes wait for its end."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Hold:
    """Whoever passes has begun before a change, or after it."""

    def __init__(self) -> None:
        self._holders = 0
        self._moved = asyncio.Event()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Let nobody pass meanwhile."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self.look_again()

    def look_again(self) -> None:
        """Wake those that wait: something that they asked about may have changed."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def passed(self, unless: Callable[[], bool]) -> None:
        """Wait until it is open, or until `unless` says that there is nothing to wait for."""
        while self._holders and not unless():
            await self._moved.wait()
