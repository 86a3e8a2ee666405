"""Supervisor of an engine: adopts or starts it, watches it, restarts it a bounded number of times.

`HangWatch` finds a guest that lives and makes no progress: without a core, stopped, or stuck for
too long.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from executor import GuestState
from rose.engines import EngineProcess, EngineSpec, share_of
from rose.errors import RoseError
from rose.logs.eventlog import EventLog
from rose.node.guest.cpu_placement import CpuPlacement
from rose.node.guest.guest_record import GuestLock, fingerprint
from rose.process.launcher import lower_group
from rose.process.procfs import STOPPED, ProcessIdentity, group_states, named_in_group

# Seconds without a heartbeat before /proc is read: a guest runs behind all other processes, so a
# busy host alone may silence it for a while.
SILENT_S = 2.0
STUCK_S = 60.0
# Process names, as the kernel cuts them, of engine cores and of ranks in processes of their own.
CORE = "VLLM::EngineCor"
RANKS = "VLLM::Worker", "sglang::schedul"
_NS = 1e9
_T = TypeVar("_T")
_logger = logging.getLogger("rose.node")


class HangWatch:
    """Detector of a hung guest, by /proc and by the heartbeat on its page."""

    def __init__(self) -> None:
        self._watched: int | None = None
        self._parts: dict[ProcessIdentity, str] = {}

    def reason(self, guest: GuestState | None, group: int | None) -> str | None:
        """Return why a hung guest's process group must be ended: dead engine core or rank, SIGSTOP
        for SILENT_S or no heartbeat for STUCK_S; None if it is well or unknown.
        """
        if guest is None or group is None:
            return None
        if ended := self._ended(group):
            return f"its {'engine core' if ended == CORE else 'rank'} is dead"
        silent_s = (time.monotonic_ns() - guest.heartbeat_ns) / _NS
        if silent_s > STUCK_S:
            return f"no sign of life for {STUCK_S:.0f} s"
        if silent_s > SILENT_S and STOPPED in group_states(group):
            return f"stopped (SIGSTOP) for {SILENT_S:.0f} s"
        return None

    def _ended(self, group: int) -> str | None:
        """Return the name of a process of the engine that has ended, which its parent notices only
        seconds later; None if all of them run.
        """
        if group != self._watched:
            self._watched, self._parts = group, {}
        if not self._parts:
            self._parts = named_in_group(group, (CORE, *RANKS))
        return next((name for part, name in self._parts.items() if not part.running), None)


MAX_SHORT_LIVES = 6
STABLE_S = 60.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
POLL_S = 0.2


class EngineState(StrEnum):
    """State of a supervised engine.

    STARTING: its process starts. HEALTHY: it answers. BACKOFF: pause before a restart. STOPPED: it
    was stopped or may not run now. FAILED: it ended too often and is not started again.
    """

    STARTING = "starting"
    HEALTHY = "healthy"
    BACKOFF = "backoff"
    STOPPED = "stopped"
    FAILED = "failed"


class EngineOwner(Protocol):
    """Interface through which the supervisor reports an engine's states and asks if the engine may
    run.
    """

    async def entered(self, state: EngineState) -> None:
        """Handle a new state; `Supervisor.state` changes only after this has returned."""

    def must_end(self) -> str | None:
        """Return why the engine must not exist, so that it is ended at once; None if it may."""

    def must_wait(self) -> str | None:
        """Return why the engine must not be started now, None if it may; a running engine stays."""

    def hangs(self) -> str | None:
        """Return why the running engine counts as hung, so that it is ended; None if it works."""

    def check_room(self) -> None:
        """Raise RoseError if the engine cannot be started now (called in a thread)."""


class Supervisor:
    """Supervisor of one engine: it adopts or starts the engine of `spec` and restarts it, as its
    owner allows, until `stop`.

    After MAX_SHORT_LIVES runs in a row that end within STABLE_S or never get healthy it stays
    FAILED. Runs that the owner ended (`must_end`) do not count. restarts: number of times that the
    engine was started again.
    """

    def __init__(
        self,
        spec: EngineSpec,
        start_timeout_s: float,
        events: EventLog,
        owner: EngineOwner,
        claim: GuestLock | None = None,
    ) -> None:
        """Prepare the supervisor of `spec`; without a `claim`, the lock of the guest's record, the
        engine ends with this process.
        """
        self.spec = spec
        self.state = EngineState.STARTING
        self.restarts = 0
        self._start_timeout_s = start_timeout_s
        self._events = events
        self._owner = owner
        self._claim = claim
        self._engine: EngineProcess | None = None
        self._stopping = asyncio.Event()
        self._unwanted: str | None = None
        self._waits_for: str | None = None
        self._short_lives = 0
        self._fresh = False
        self._switched = False
        self._forbidden = False

    @property
    def warming(self) -> bool:
        """True until an engine that this daemon started is healthy for the first time (any thread).

        False for an adopted engine: it may still hold turns of a forgotten lease.
        """
        return self._fresh

    @property
    def pid(self) -> int | None:
        """Process id of the engine's API process, None while none runs."""
        return self._engine.process.pid if self._engine else None

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that authorize control requests to the running engine; empty while none
        runs.
        """
        return self._engine.headers if self._engine else {}

    async def run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        adopted = await self._adopt()
        while not self._stopping.is_set():
            if adopted is None and (reason := self._barred()):
                await self._wait_for(reason)
                continue
            if await self._one_life(adopted):
                backoff_s = FIRST_BACKOFF_S
            adopted = None
            if self._stopping.is_set() or self._barred():
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
        """Mark the running engine to be ended, within POLL_S; `run` then starts it again after the
        usual pause.
        """
        self._log("engine_unwanted", reason=reason)
        self._unwanted = reason

    def switch(self, spec: EngineSpec, reason: str) -> None:
        """Set the spec of the next engine and mark the running one to be ended; that end does not
        count as a failure.
        """
        self.spec = spec
        self._switched = True
        self.restart(reason)

    async def stop(self) -> None:
        """Stop the engine and let `run` return."""
        self._stopping.set()
        if self._engine:
            await self._engine.stop()

    def _barred(self) -> str | None:
        return self._owner.must_end() or self._owner.must_wait()

    async def _wait_for(self, reason: str) -> None:
        """Pause for POLL_S in state STOPPED, and log a new reason once."""
        if reason != self._waits_for:
            self._log("engine_waits", reason=reason)
            self._waits_for = reason
        if self.state is not EngineState.STOPPED:
            await self._enter(EngineState.STOPPED)
        await self._pause(POLL_S)

    async def _pause(self, seconds: float) -> None:
        """Sleep for some seconds, or until `stop` is called."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _adopt(self) -> EngineProcess | None:
        """Return the engine that an earlier daemon left running, None without one; end one that
        must not exist, has other settings or is not warm.
        """
        record = self._claim.found() if self._claim else None
        if record is None:
            return None
        engine = EngineProcess.adopt(self.spec, record.identity, record.secret)
        refusal = self._owner.must_end()
        if record.spec != fingerprint(self.spec):
            refusal = "it was started with other settings"
        elif refusal is None and await engine.warms_up():
            # Only the daemon that starts an engine grants it time to warm up: see `warming`.
            refusal = "it was not warm yet"
        if refusal is None:
            # Lower its priority again: the earlier daemon may have died while it was boosted.
            lower_group(record.identity.pid, share_of(self.spec) or "background")
            self._log("engine_adopted", pid=record.identity.pid)
            return engine
        self._log("engine_not_adopted", pid=record.identity.pid, reason=refusal)
        await self._reclaim(engine, refusal)
        return None

    async def _obtain(self) -> EngineProcess:
        await asyncio.to_thread(
            self._owner.check_room
        )  # in a thread, since it may ask a driver, which may hang
        keep = self._claim.begin() if self._claim else None
        engine = await EngineProcess.start(self.spec, keep)
        if self._claim:
            self._claim.record(engine.process.pid, self.spec, engine.secret)
        self._log("engine_started", pid=engine.process.pid)
        return engine

    async def _healthy(self, engine: EngineProcess) -> None:
        """Wait until the engine is healthy; the start's time limit does not run while the owner
        makes it wait, and `must_end` ends it.
        """
        start = engine.wait_healthy(
            self._start_timeout_s, lambda: self._owner.must_wait() is not None
        )
        await self._done(start, engine, lambda: None)

    async def _done(
        self, work: Coroutine[Any, Any, _T], engine: EngineProcess, hangs: Callable[[], str | None]
    ) -> _T:
        """Return the result of `work`; meanwhile end the engine if the owner forbids it, `restart`
        was called or it hangs.
        """
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait((task,), timeout=POLL_S))[0]:
                reason = self._owner.must_end()
                self._forbidden = self._forbidden or reason is not None
                if reason := reason or self._unwanted or hangs():
                    await self._reclaim(engine, reason)
                    break
            return await task
        finally:
            task.cancel()

    async def _reclaim(self, engine: EngineProcess, reason: str) -> None:
        began_s = time.monotonic()
        await engine.process.kill()
        self._log("engine_reclaimed", reason=reason, seconds=time.monotonic() - began_s)

    async def _one_life(self, adopted: EngineProcess | None) -> bool:
        """Start or adopt the engine, wait for its end and clean up; return True if it ever was
        healthy.
        """
        await self._enter(EngineState.STARTING)
        self._waits_for = None
        healthy = False
        self._unwanted = None
        self._forbidden = False
        self._fresh = adopted is None
        started_s = time.monotonic()
        try:
            self._engine = adopted or await self._obtain()
            await self._healthy(self._engine)
            healthy = True
            self._fresh = False
            self._note_place(self._engine.process.pid)
            await self._enter(EngineState.HEALTHY)
            code = await self._done(self._engine.process.wait(), self._engine, self._owner.hangs)
            self._log("engine_ended", code=code, wanted=self._stopping.is_set())
        except (RoseError, OSError) as error:
            # Without free descriptors this engine ends; the daemon and its other guests go on.
            self._log("engine_start_failed", message=str(error))
            _logger.warning("%s", error)
        finally:
            self._fresh = False
            if self._engine:
                # Processes that the engine started may outlive it and must not.
                await self._engine.process.kill()
                self._engine = None
            if self._claim:
                self._claim.drop()
        stable = healthy and time.monotonic() - started_s >= STABLE_S
        if self._switched:
            stable, self._switched = True, False
        if stable:
            self._short_lives = 0
        elif not self._forbidden:
            self._short_lives += 1
        return healthy

    def _note_place(self, pid: int) -> None:
        if place := CpuPlacement.of(pid):
            self._log("engine_placed", **asdict(place))

    async def _enter(self, state: EngineState) -> None:
        # Set the state afterwards: an engine is offered as healthy only once it has reported its
        # version.
        await self._owner.entered(state)
        self.state = state

    def _log(self, event: str, **fields: object) -> None:
        self._events.write(event, engine=self.spec.name, **fields)
