"""A fixed number of streams, each with its next request as soon as the last one ended."""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import aiohttp

from rose.load.generator import CompletionBody, complete

TOKEN_IDS = (3, 250)
RETRY_S = 0.2


class ClosedLoop:
    """Streams of greedy completions with lengths taken from `lengths` (prompt, output)."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        streams: int,
        lengths: Iterator[tuple[int, int]],
        seed: str,
        secret: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.done = 0
        self.failed = 0
        self._session = session
        self._secret = secret
        self._url = f"{url}/v1/completions"
        self._model = model
        self._streams = streams
        self._lengths = lengths
        self._rng = random.Random(f"closed/{seed}")  # noqa: S311 - a load, not a secret
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all streams."""
        self._tasks = [asyncio.create_task(self._stream(k)) for k in range(self._streams)]

    async def stop(self) -> None:
        """Hang up: an engine aborts what nobody waits for."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []

    async def _stream(self, index: int) -> None:
        # First answers are cut to different lengths, or all streams would end in the same step.
        share = (index + 1) / self._streams
        number = 0
        while True:
            prompt_tokens, output_tokens = next(self._lengths)
            output_tokens = max(2, round(output_tokens * share))
            share = 1.0
            prompt = self._rng.choices(range(*TOKEN_IDS), k=prompt_tokens)
            body = CompletionBody(self._model, prompt, output_tokens)
            name = f"closed{index}n{number}"
            result = await complete(
                self._session, self._url, body, name, time.monotonic(), self._secret
            )
            number += 1
            if result.status == "ok":
                self.done += 1
            else:
                self.failed += 1
                await asyncio.sleep(RETRY_S)
