"""Turns on a guest while its weights change: every token says which version sampled it."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rose.bench.gpu.errors import PieceError

PROMPT = tuple(range(3, 35))
TURN_TIMEOUT_S = 120.0
RETRY_S = 0.2
# A guest refuses turns while a version is activated; no longer than that.
REFUSED_MOST_S = 30.0
_UNAVAILABLE = 503


@dataclass(slots=True)
class StampedTurns:
    """One turn after another until it is stopped; what their tokens said."""

    http: aiohttp.ClientSession
    url: str
    output_tokens: int
    headers: Mapping[str, str] = field(default_factory=dict)
    tokens: Counter[int] = field(default_factory=Counter)
    across: int = 0
    turns: int = 0

    async def run(self) -> None:
        """Play turns for as long as it is let."""
        await self._post("admit", {"epoch": 1})
        while True:
            await self.turn()

    async def turn(self) -> list[int]:
        """Play one; the versions of its chunks. Raises PieceError for what is not stamped."""
        versions: list[int] = []
        for line in await self._lines():
            if "finish_reason" in line:
                break
            if not isinstance(line.get("version"), int) or versions[-1:] > [line["version"]]:
                raise PieceError(f"a chunk after version {versions[-1:]} is stamped {line}")
            versions.append(line["version"])
            self.tokens[line["version"]] += len(line["token_ids"])
        self.turns += 1
        self.across += len(set(versions)) > 1
        return versions

    async def _lines(self) -> list[dict[str, Any]]:
        body = {
            "request_id": f"stamped-{self.turns}",
            "token_ids": PROMPT,
            "sampling": {"max_tokens": self.output_tokens, "temperature": 1.0},
        }
        until_s = time.monotonic() + REFUSED_MOST_S
        while True:
            status, text = await self._post("generate", body)
            if status != _UNAVAILABLE or time.monotonic() > until_s:
                break
            await asyncio.sleep(RETRY_S)
        if status != 200:
            raise PieceError(f"the guest refused a turn: {status} {text[:200]}")
        return [json.loads(line) for line in text.splitlines() if line]

    async def _post(self, path: str, body: object) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=TURN_TIMEOUT_S)
        url = f"{self.url}/rose/v1/{path}"
        async with self.http.post(url, json=body, timeout=timeout, headers=self.headers) as answer:
            return answer.status, await answer.text()
