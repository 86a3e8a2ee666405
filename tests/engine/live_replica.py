"""One client of a real gated replica, by its HTTP contract."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from pool import Started
from tiny_model import VOCABULARY

from weight_transfer.format.manifest import Manifest

PROMPT = [(7 * k + 3) % VOCABULARY for k in range(70)]
Lines = list[dict[str, Any]]


@dataclass
class Replica:
    """A client that controls the engine too."""

    engine: Started
    http: aiohttp.ClientSession

    async def call(self, path: str, body: object = None) -> tuple[int, Any]:
        method = "GET" if body is None else "POST"
        url, headers = f"{self.engine.url}/rose/v1/{path}", self.engine.headers
        async with self.http.request(method, url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def admit(self) -> int:
        epoch = next(self.engine.epochs)
        assert (await self.call("admit", {"epoch": epoch}))[0] == 200
        return epoch

    async def stream(
        self,
        tokens: list[int],
        max_tokens: int,
        salt: str | None = None,
        job: str = "",
        **sampling: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        body = {
            "request_id": "turn",
            "token_ids": tokens,
            "sampling": {"temperature": 0.0, "max_tokens": max_tokens, **sampling},
            "cache_salt": salt,
            "job": job,
        }
        async with self.http.post(f"{self.engine.url}/rose/v1/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                yield json.loads(line)

    async def lines(self, tokens: list[int], max_tokens: int, **how: Any) -> Lines:
        return [line async for line in self.stream(tokens, max_tokens, **how)]

    async def prepared(self) -> None:
        """Wait until an update would not have to wait for the worker's own start."""
        assert (await self.call("weights/audit", {}))[0] == 200

    def publish(self, seed: int) -> dict[str, str]:
        """The next version, a little different; returns the body that applies it."""
        versions = self.engine.versions
        return versions.next(versions.changed(seed))

    async def apply(self, paths: dict[str, str]) -> dict[str, Any]:
        status, report = await self.call("weights/apply", paths)
        assert status == 200, report
        assert report["digest_ok"]
        assert report["probe_ok"]
        return dict(report)


def tokens_of(lines: Lines) -> list[int]:
    return [token for line in lines for token in line.get("token_ids", [])]


def versions_of(lines: Lines) -> list[int]:
    return [line["version"] for line in lines for _ in line.get("token_ids", [])]


def sampled(lines: Lines) -> list[tuple[int, float]]:
    """Tokens with their logprobs, however they were cut into chunks."""
    pairs = (
        zip(line.get("token_ids", ()), line.get("logprobs", ()), strict=True) for line in lines
    )
    return [pair for pairs_of_line in pairs for pair in pairs_of_line]


def first_logprob(lines: Lines) -> float:
    logprob: float = lines[0]["logprobs"][0]
    return logprob


def forge(manifest: Path) -> Path:
    """The manifest under another trainer's name, its signature left as it was."""
    forged = manifest.with_name("forged.manifest")
    read = Manifest.from_bytes(manifest.read_bytes())
    forged.write_bytes(replace(read, trainer="somebody else").to_bytes())
    return forged
