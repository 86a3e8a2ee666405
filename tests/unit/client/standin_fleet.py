"""Gateways and replicas as a client sees them, in this process and in virtual time."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rose.client import GatewayUnavailable, Sampling, Session, Turn, VersionNotServed
from rose.client.stream import ChunkSink, TurnStream
from rose.client.types import TokenChunk


@dataclass
class StandInFleet:
    """A client whose turns are answered by made-up replicas.

    Replicas take up a version `lag_s` after it came out, in mid-turn too; `late` of them are one
    version behind those. A turn may fail, and `lies` turns ignore the version that was asked for.
    """

    dice: random.Random
    version: int = 0
    lag_s: float = 0.0
    fails: float = 0.0
    late: float = 0.0
    lies: int = 0
    max_tokens_s: float = 3.0
    finish_s: tuple[float, ...] = (0.0, 0.05)
    live: int = 0
    most_live: int = 0
    refused: int = 0
    ids: set[str] = field(default_factory=set)
    open_sessions: set[str] = field(default_factory=set)
    served: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])

    def publish(self, version: int) -> None:
        self.version = version
        self.served.append((asyncio.get_running_loop().time() + self.lag_s, version))

    def newest(self) -> int:
        """The newest version that replicas have taken up."""
        now_s = asyncio.get_running_loop().time()
        return max(version for at_s, version in self.served if at_s <= now_s)

    def session(self, session_id: str = "") -> Session:
        self.open_sessions.add(session_id)
        return Session(self, session_id, self._finish)

    async def _finish(self, session_id: str, job: str) -> None:
        await asyncio.sleep(self.dice.choice(self.finish_s))
        self.open_sessions.remove(session_id)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **options: Any) -> Turn:
        async def nowhere(chunk: TokenChunk) -> None: ...

        return await self._turn(nowhere, options)

    def stream(self, token_ids: Sequence[int], sampling: Sampling, **options: Any) -> TurnStream:
        return TurnStream(lambda sink: self._turn(sink, options))

    async def _turn(self, sink: ChunkSink, options: dict[str, Any]) -> Turn:
        assert options["request_id"] not in self.ids, "a request id means one turn"
        self.ids.add(options["request_id"])
        assert options["session_id"] in self.open_sessions
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            return await self._tokens(sink, options)
        finally:
            self.live -= 1

    async def _tokens(self, sink: ChunkSink, options: dict[str, Any]) -> Turn:
        wanted = await self._fence(options)
        behind = self.dice.random() < self.late
        versions: list[int] = []
        for at in range(self.dice.randrange(4)):
            await asyncio.sleep(self.dice.random() * self.max_tokens_s)
            if self.dice.random() < self.fails:
                raise GatewayUnavailable("the stand-in fails here")
            version = max(wanted, self.newest() - behind)
            if self.lies > 0:
                self.lies -= 1
                version = max(0, self.newest() - 3)
            versions.append(version)
            await sink(TokenChunk((at,), (-1.0,), version, at))
        spans = tuple((version, at, at + 1) for at, version in enumerate(versions))
        logprobs = (-1.0,) * len(versions)
        tokens = (*range(len(versions)),)
        return Turn(options["request_id"], tokens, logprobs, spans, (), "stop", 1)

    async def _fence(self, options: dict[str, Any]) -> int:
        """Wait until a replica serves what is asked for, as a gateway does."""
        wanted = int(options["min_version"])
        assert wanted <= self.version, "no replica will serve that soon"
        for _ in range(600):
            if self.newest() >= wanted:
                return wanted
            await asyncio.sleep(0.05)
        self.refused += 1
        raise VersionNotServed(f"nobody serves {wanted}")
