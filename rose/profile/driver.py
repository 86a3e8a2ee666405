"""Runs batches of turns on a guest and hands back what its step log says of each.

freeze ──► turns posted ──► all are seen waiting ──► allow ──► every turn ends ──► new records read
Without the freeze the first turns of a batch would be steps ahead of the last.
"""

import asyncio
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import aiohttp

from executor.step_log import HEADER, STEP, StepRecord, read_step_log, used_bytes
from rose.engines import EngineProcess
from rose.errors import EngineStartError
from rose.profile.open_grant import OpenGrant
from rose.profile.plan import DECODE_STEPS, Batch
from rose.profile.samples import LoggedStep, steps_of

# The first run of a batch pays for kernels and pages that no later one pays for.
RUNS, UNCOUNTED_RUNS = 3, 1
WAITING_S = 20.0
POLL_S = 0.005
ENDS_S = 5.0


class UnfinishedTurnError(Exception):
    """A turn did not come to its end; the message is the last line of its stream."""


class Driver:
    """One engine under measurement. Raises EngineStartError when it fails or ends."""

    def __init__(
        self,
        engine: EngineProcess,
        grant: OpenGrant,
        http: aiohttp.ClientSession,
        logs: Path,
        vocabulary: int,
    ) -> None:
        """`logs`: the folder that ROSE_STEP_LOG named."""
        self._engine = engine
        self._grant = grant
        self._http = http
        self._logs = logs
        self._vocabulary = vocabulary
        self._rng = random.Random(0)  # noqa: S311 -- prompts, not secrets
        self._names = count()
        self._read = 0

    async def admit(self) -> int:
        """Open the replica for turns; returns how many tokens of KV it holds."""
        url, headers = self._engine.spec.url, self._engine.headers
        try:
            async with self._http.post(
                f"{url}/rose/v1/admit", json={"epoch": 1}, headers=headers
            ) as answer:
                answer.raise_for_status()
            async with self._http.get(f"{url}/rose/v1/state") as answer:
                return int((await answer.json())["kv_tokens"])
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            raise await self._failed(error) from error

    async def runs(self, batch: Batch) -> list[list[LoggedStep]]:
        """The steps of each counted run of a batch."""
        found = []
        for number in range(UNCOUNTED_RUNS + RUNS):
            steps = steps_of(batch, await self._run(batch))
            if number >= UNCOUNTED_RUNS:
                found.append(steps)
        return found

    async def _run(self, batch: Batch) -> Sequence[StepRecord]:
        self._grant.freeze()
        turns = [asyncio.create_task(self._turn(batch)) for _ in range(batch.sequences)]
        try:
            await self._until_waiting(batch.sequences, turns)
            self._grant.allow(batch.token_budget)
            await asyncio.gather(*turns)
        except (aiohttp.ClientError, TimeoutError, UnfinishedTurnError) as error:
            raise await self._failed(error) from error
        finally:
            for turn in turns:
                turn.cancel()
        return self._new_records()

    async def _until_waiting(self, sequences: int, turns: Sequence["asyncio.Task[None]"]) -> None:
        async with asyncio.timeout(WAITING_S):
            while self._grant.guest().waiting < sequences:
                for turn in turns:
                    if turn.done():
                        turn.result()
                await asyncio.sleep(POLL_S)

    async def _turn(self, batch: Batch) -> None:
        tokens = [self._rng.randrange(self._vocabulary) for _ in range(batch.prompt_tokens)]
        body = {
            "request_id": f"profile-{next(self._names)}",
            "token_ids": tokens,
            "sampling": {"temperature": 1.0, "max_tokens": DECODE_STEPS},
        }
        url = f"{self._engine.spec.url}/rose/v1/generate"
        async with self._http.post(url, json=body) as answer:
            lines = (await answer.read()).splitlines()
            if answer.status != 200 or not lines or b'"length"' not in lines[-1]:
                said = lines[-1].decode(errors="replace") if lines else f"HTTP {answer.status}"
                raise UnfinishedTurnError(said)

    def _new_records(self) -> list[StepRecord]:
        path = next(self._logs.glob("steps-guest-*.bin"), None)
        if path is None:
            raise EngineStartError(f"the engine wrote no step log; see {self._engine.spec.log}")
        with path.open("rb") as file:
            header = file.read(HEADER.size)
            records = read_step_log(header + file.read(used_bytes(header) - HEADER.size))
        fresh, self._read = records[self._read :], len(records)
        return [record for record in fresh if record.kind == STEP]

    async def _failed(self, error: Exception) -> EngineStartError:
        spec = self._engine.spec
        # Its last turns break off a moment before it is gone.
        await asyncio.wait((asyncio.ensure_future(self._engine.process.wait()),), timeout=ENDS_S)
        if self._engine.process.returncode is None:
            return EngineStartError(f"the engine does not do its turns: {error!r}; see {spec.log}")
        return EngineStartError(
            f"the engine ended while it was profiled: {self._engine.last_words()}; see {spec.log}"
        )
