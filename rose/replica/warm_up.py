"""Warm-up: steps of every size before the first lease, since the first of a kind compiles kernels.

asked for ──► waiting for the gate ──► running ──► prefixes dropped ──► warm
                                          └─► longer than allowed, or the engine failed: not warm

The steps pass the gate like any others: the node grants them while it starts the engine, in
host-idle time only. Time in which the gate lets nothing run does not count against the bound. None
of their tokens is a rollout's: the guest section leaves out WARM_UP requests.
"""

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable
from typing import Final

from executor import PageError
from executor.engine_settings import WARM_UP
from rose.contract.replica import GenerateBody, Sampling
from rose.replica.control import GuestControl
from rose.replica.engine import (
    WARM_UP_OUTPUT_TOKENS,
    ReplicaEngine,
    RequestRefusedError,
    StampedRequest,
)
from rose.replica.token_versions import KvStaleness, UnknownVersionError

SECONDS: Final = "ROSE_WARM_UP_S"
POLL_S: Final = 0.02
RESETS, RESET_PAUSE_S = 50, 0.1
_LOG = logging.getLogger("vllm.rose.replica")


class WarmUpError(Exception):
    """Error raised because a warm-up did not finish; the message is one line."""


class WarmUp:
    """Warm-up of one engine: it runs batches of every size once, so that kernels are compiled
    before the first lease.

    warm: True if it has finished or was not asked for. failed: True if it broke off. said: its
    state in one line for a log.
    """

    def __init__(
        self,
        engine: ReplicaEngine,
        control: GuestControl,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._control = control
        self._clock_s = clock_s
        self._limit_s = _limit_s(os.environ.get(SECONDS, ""))
        self._rng = random.Random(0)  # noqa: S311 -- prompts, not secrets
        self._task: asyncio.Task[None] | None = None
        self._vocabulary = 0
        self._began_s = 0.0
        self._yielded_before_s = self._last_yielded_s = 0.0
        self.warm = self._limit_s is None
        self.failed = False
        self.said = "no warm-up was asked for"

    def start(self) -> None:
        """Start the warm-up in the background if ROSE_WARM_UP_S asks for one."""
        if self._limit_s is not None:
            self.said = "warm-up begins"
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            self._began_s, self._yielded_before_s = self._clock_s(), self._yielded_s()
            sizes = self._engine.sizes
            self._vocabulary, batches = sizes.vocabulary, list(sizes.batches())
            for number, (sequences, prompt) in enumerate(batches):
                self._check_time()
                self.said = f"warm-up: {number} of {len(batches)} sizes"
                await self._batch(sequences, prompt)
            await self._forget()
            self.said = f"warm after {len(batches)} sizes in {self._spent_s():.1f} s of its own"
            self.warm = True
            _LOG.info(self.said)
        except (WarmUpError, PageError, RequestRefusedError, UnknownVersionError) as error:
            self._end(str(error))
        except self._engine.failures as error:
            self._end(f"{type(error).__name__}: {error}")
        except Exception as error:  # any error must set `failed`
            self._end(f"{type(error).__name__}: {error}")
            raise

    def _end(self, why: str) -> None:
        self.failed = True
        self.said = f"{self.said}, then no more: {why}"
        _LOG.warning(self.said)

    async def _batch(self, sequences: int, prompt: int) -> None:
        requests: list[StampedRequest] = []
        turns: list[asyncio.Task[None]] = []
        try:
            for number in range(sequences):
                request = await self._engine.start(self._body(number, prompt), KvStaleness())
                requests.append(request)
                turns.append(asyncio.create_task(_finish(request)))
            while not (await asyncio.wait(turns, timeout=POLL_S))[0] >= set(turns):
                self._check_time()
            for turn in turns:
                turn.result()
        except BaseException:
            for turn in turns:
                turn.cancel()
            await self._engine.abort(requests)
            raise

    def _body(self, number: int, prompt: int) -> GenerateBody:
        return GenerateBody(
            f"{WARM_UP}{number}",
            [self._rng.randrange(self._vocabulary) for _ in range(prompt)],
            # Greedy and sampled turns take different ways through the sampler.
            Sampling(temperature=float(number % 2 == 0), max_tokens=WARM_UP_OUTPUT_TOKENS),
        )

    async def _forget(self) -> None:
        """Drop all cached prefixes of the warm-up, which hold memory; try again while some are in
        use.
        """
        for _ in range(RESETS):
            if await self._engine.reset_prefix_cache():
                return
            self._check_time()
            await asyncio.sleep(RESET_PAUSE_S)
        raise WarmUpError("its prefixes stayed in the cache")

    def _check_time(self) -> None:
        assert self._limit_s is not None
        if self._spent_s() > self._limit_s:
            raise WarmUpError(f"it took longer than {self._limit_s:.0f} s that it was let run")

    def _spent_s(self) -> float:
        """Return the seconds since the warm-up began, less those in which the guest's gate held it
        back.
        """
        held_back_s = self._yielded_s() - self._yielded_before_s
        return self._clock_s() - self._began_s - held_back_s

    def _yielded_s(self) -> float:
        if (yielded_s := self._control.yielded_s()) is not None:
            self._last_yielded_s = yielded_s
        return self._last_yielded_s


async def _finish(request: StampedRequest) -> None:
    while (await request.next()).finish_reason is None:
        continue


def _limit_s(text: str) -> float | None:
    """Return the warm-up's limit in seconds, None if the text is empty. Raises ValueError for an
    invalid time.
    """
    if not text:
        return None
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{SECONDS} is {text}; give positive seconds")
    return seconds
