"""Keeps one engine running: start, watch, restart a bounded number of times, end."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum

from rose.engines import EngineProcess, EngineSpec
from rose.errors import RoseError
from rose.eventlog import EventLog

MAX_SHORT_LIVES = 6
STABLE_S = 60.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
BLOCKED_POLL_S = 0.2


class EngineState(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    HEALTHY = "healthy"
    BACKOFF = "backoff"
    STOPPED = "stopped"
    FAILED = "failed"


class Supervisor:
    """Runs `spec` until `stop`. `on_change` is awaited with each new state.

    MAX_SHORT_LIVES lives in a row shorter than STABLE_S are one too many: it stays `failed`, which
    telemetry says, and the rest of the node goes on.
    """

    def __init__(
        self,
        spec: EngineSpec,
        start_timeout_s: float,
        events: EventLog,
        on_change: Callable[[EngineState], Awaitable[None]],
        blocked: Callable[[], bool] = lambda: False,
    ) -> None:
        """`blocked`: while true nothing is started (the kill switch)."""
        self.spec = spec
        self.state = EngineState.STARTING
        self.restarts = 0
        self._start_timeout_s = start_timeout_s
        self._events = events
        self._on_change = on_change
        self._blocked = blocked
        self._engine: EngineProcess | None = None
        self._stopping = asyncio.Event()
        self._unwanted = False
        self._short_lives = 0

    @property
    def pid(self) -> int | None:
        """Process id of the engine's API process while it runs."""
        return self._engine.process.pid if self._engine else None

    async def run(self) -> None:
        """Until stopped."""
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            if self._blocked():
                await self._enter(EngineState.STOPPED)
                await self._pause(BLOCKED_POLL_S)
                continue
            if await self._one_life():
                backoff_s = FIRST_BACKOFF_S
            if self._stopping.is_set() or self._blocked():
                continue
            if self._short_lives >= MAX_SHORT_LIVES:
                await self._enter(EngineState.FAILED)
                await self._stopping.wait()
                break
            self.restarts += 1
            await self._enter(EngineState.BACKOFF)
            await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        await self._enter(EngineState.STOPPED)

    def restart(self, reason: str) -> None:
        """End this life of the engine; the next one begins as after any other end."""
        self._log("engine_unwanted", reason=reason)
        self._unwanted = True

    async def stop(self) -> None:
        """End the engine and do not start it again."""
        self._stopping.set()
        if self._engine:
            await self._engine.stop()

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless it is time to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _end_of(self, engine: EngineProcess) -> int:
        """Exit status of the engine; the kill switch or a wanted restart ends it first."""
        ended = asyncio.create_task(engine.process.wait())
        while not (await asyncio.wait((ended,), timeout=BLOCKED_POLL_S))[0]:
            if self._blocked() or self._unwanted:
                await engine.process.kill()
        return ended.result()

    async def _one_life(self) -> bool:
        """Start, and wait for the end; True when it was healthy in between."""
        await self._enter(EngineState.STARTING)
        healthy = False
        self._unwanted = False
        started_s = time.monotonic()
        try:
            self._engine = await EngineProcess.start(self.spec)
            self._log("engine_started", pid=self._engine.process.pid)
            await self._engine.wait_healthy(self._start_timeout_s)
            healthy = True
            await self._enter(EngineState.HEALTHY)
            code = await self._end_of(self._engine)
            self._log("engine_ended", code=code, wanted=self._stopping.is_set())
        except RoseError as error:
            self._log("engine_start_failed", message=str(error))
        finally:
            if self._engine:
                # What the engine started may outlive it; nothing of it may.
                with contextlib.suppress(ProcessLookupError):
                    await self._engine.process.kill()
                self._engine = None
        stable = healthy and time.monotonic() - started_s >= STABLE_S
        self._short_lives = 0 if stable else self._short_lives + 1
        return healthy

    async def _enter(self, state: EngineState) -> None:
        self.state = state
        await self._on_change(state)

    def _log(self, event: str, **fields: object) -> None:
        self._events.write(event, engine=self.spec.name, **fields)
