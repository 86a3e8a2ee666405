"""The control `corrupt-chunk`: a trainer whose chunks arrive with flipped bits."""

import asyncio
from typing import Any

from aiohttp import web

from rose.weight_distribution import VersionServer, WeightPublisher


class CorruptServer(VersionServer):
    """A server that flips one bit of the first answer for every `every`-th chunk.

    Receivers must notice, and are healed by fetching again.
    """

    every = 7

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401 - as its base is made
        super().__init__(*args, **named)
        self._answered: set[str] = set()

    async def _stored(self, name: str) -> web.StreamResponse:
        body = await asyncio.to_thread(self._store.get, name)
        first = name not in self._answered
        self._answered.add(name)
        if first and len(self._answered) % self.every == 0:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        return web.Response(body=body)


class CorruptPublisher(WeightPublisher):
    """A trainer's publisher that serves by a `CorruptServer`."""

    _server_class = CorruptServer
