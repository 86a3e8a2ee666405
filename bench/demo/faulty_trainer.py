"""Faults of a trainer: the controls `corrupt-chunk` and `drop-token`."""

import asyncio
from dataclasses import replace
from typing import Any

from aiohttp import web

from rose.client import RolloutClient, Turn
from rose.weight_distribution import VersionServer, WeightPublisher


class CorruptServer(VersionServer):
    """Server that flips one bit of the first answer for every `every`-th chunk.

    Receivers must notice the flipped bit, and are healed by fetching again.
    """

    every = 7

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401 - as its base is made
        super().__init__(*args, **named)
        self._answered: set[str] = set()

    async def _stored(self, name: str) -> web.StreamResponse:
        return web.Response(body=await asyncio.to_thread(self._sent, name))

    def _together(self, names: list[str]) -> bytes:
        return b"".join(map(self._sent, names))

    def _sent(self, name: str) -> bytes:
        body = self._store.get(name)
        first = name not in self._answered
        self._answered.add(name)
        if first and len(self._answered) % self.every == 0:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        return body


class CorruptPublisher(WeightPublisher):
    """Publisher that serves by a `CorruptServer`."""

    _server_class = CorruptServer


class LossyJournal(RolloutClient):
    """Client that loses the last token before each first move of a turn.

    The tokens that follow were generated after the lost one. Every list has the right length, so
    only scoring the tokens again can notice the loss.
    """

    async def generate(self, *args: Any, **named: Any) -> Turn:  # noqa: ANN401 - as its base does
        return without_the_token_at_the_seam(await super().generate(*args, **named))


def without_the_token_at_the_seam(turn: Turn) -> Turn:
    """Return a turn that moved without the last token of its first segment."""
    if len(turn.segments) < 2:
        return turn
    lost = turn.segments[0][3] - 1
    return replace(
        turn,
        token_ids=turn.token_ids[:lost] + turn.token_ids[lost + 1 :],
        logprobs=turn.logprobs[:lost] + turn.logprobs[lost + 1 :],
        versions=tuple(
            (version, start - (start > lost), end - (end > lost))
            for version, start, end in turn.versions
        ),
        segments=tuple(
            (replica, kind, start - (start > lost), end - (end > lost))
            for replica, kind, start, end in turn.segments
        ),
    )
