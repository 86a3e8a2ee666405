"""Takes memory back from a guest, level by level, and goes by what is measured (`MemoryGauge`).

L0 to L2 go through the grant: freeze, then a cap of KV granules, then the tightest cap. L3 asks the
engine, L4 its supervisor. While a reclaim lasts the guest stays frozen, and a killed one away.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from executor import GuestState
from executor.kv.lending import LEAST_CAP
from executor.kv.reclaim_ladder import (
    Answer,
    EngineReport,
    Escalate,
    Event,
    Finished,
    GuestMeasured,
    LadderLimits,
    ReclaimCore,
    ReclaimLevel,
    Settled,
    Unsupported,
)
from executor.kv.shrink_plan import NO_CAP
from rose.errors import RefusedError, UnavailableError
from rose.logs.eventlog import EventLog
from rose.node.guest.memory_gauges import Measuring, MemoryGauge

POLL_S = 0.02
RECLAIM = "its memory is being reclaimed"
NO_SLEEP = "the engine has no sleep mode; set sleep_mode where it has"
UNSEEN = "what its weights hold cannot be measured here, so giving them up proves nothing"


class GuestMemory(Protocol):
    """Interface of a guest to its reclaim.

    can_sleep: True if its engine has a sleep route. sleep_bytes: most bytes that sleeping frees,
    None if it frees all.
    """

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> GuestState | None:
        """Guest's section of the control page, None without one."""

    @property
    def can_sleep(self) -> bool: ...

    @property
    def sleep_bytes(self) -> int | None: ...

    def gauge(self) -> MemoryGauge:
        """Return a new gauge of the guest's memory, for one reclaim."""

    def hold(self, cap: int | None) -> None:
        """Freeze the guest with a cap of KV granules, NO_CAP for no cap; None unfreezes it and
        lifts the cap.
        """

    async def sleep(self) -> None:
        """Make the engine free weights and KV memory. Raises RefusedError or UnavailableError."""

    def kill(self, reason: str) -> None:
        """End the guest's engine process; `reason` is logged."""


class Reclaimer:
    """Runner of memory reclaims of one guest, one at a time."""

    def __init__(
        self, guest: GuestMemory, events: EventLog, limits: LadderLimits | None = None
    ) -> None:
        self._guest = guest
        self._events = events
        self._limits = limits
        self._task: asyncio.Task[Finished] | None = None

    @property
    def holding(self) -> str | None:
        """Reason why the guest must not be started while a reclaim runs, else None."""
        return RECLAIM if self._task is not None and not self._task.done() else None

    def begin(
        self,
        wanted_bytes: int,
        within_s: float,
        reason: str,
        settled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start a reclaim of `wanted_bytes` within `within_s` seconds in the background; do nothing
        if one runs already (call in the event loop).

        settled: returns True once the memory is no longer owed, which ends the reclaim.
        """
        if self.holding is None:
            self._task = asyncio.create_task(self._run(wanted_bytes, within_s, reason, settled))
            self._task.add_done_callback(self._ended)

    async def reclaim(self, wanted_bytes: int, within_s: float, reason: str) -> Finished:
        """Start a reclaim of `wanted_bytes` within `within_s` seconds, or join the one that runs;
        wait for it and return its result.
        """
        self.begin(wanted_bytes, within_s, reason)
        assert self._task is not None
        return await self._task

    async def end(self) -> None:
        """Cancel the running reclaim and wait for its end, because the guest is gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[Finished]") -> None:
        if not task.cancelled() and (error := task.exception()):
            self._log("reclaim_broke", message=f"{type(error).__name__}: {error}")

    async def _run(
        self, wanted_bytes: int, within_s: float, reason: str, settled: Callable[[], bool]
    ) -> Finished:
        guest = self._guest
        now_ns = time.monotonic_ns()
        deadline_ns = now_ns + round(within_s * 1e9)
        gauge = guest.gauge()
        measuring = Measuring(gauge)
        measured = await measuring.held_bytes()
        core = ReclaimCore(now_ns, measured, wanted_bytes, deadline_ns, self._limits)
        self._log(
            "reclaim_begun",
            wanted_bytes=wanted_bytes,
            held_bytes=measured,
            measured_by=gauge.by,
            reason=reason,
        )
        climb = _Climb(guest, gauge, reason)
        try:
            while True:
                if settled():
                    self._log("reclaim_settled", wanted_bytes=wanted_bytes)
                    event: Event = Settled()
                else:
                    event = GuestMeasured(measured, climb.answer())
                for action in core.step(event, time.monotonic_ns()):
                    if isinstance(action, Finished):
                        if isinstance(event, GuestMeasured):
                            self._told(action)
                        return action
                    climb.take(action)
                await asyncio.sleep(POLL_S)
                measured = await measuring.held_bytes()
        except Exception:
            # The reclaim itself failed, and the host still needs the memory: end the guest.
            guest.kill(reason)
            raise
        finally:
            measuring.end()
            climb.end()
            guest.hold(None)

    def _told(self, finished: Finished) -> None:
        for report in finished.levels:
            self._log(
                "reclaim_level",
                level=report.level.name.lower(),
                outcome=report.outcome.value,
                freed_bytes=report.freed_bytes,
                claimed_bytes=report.claimed_bytes,
                seconds=report.took_ns / 1e9,
                why=report.why,
            )
        self._log(
            "reclaim_ended",
            wanted_bytes=finished.wanted_bytes,
            freed_bytes=finished.freed_bytes,
            enough=finished.enough,
            in_time=finished.in_time,
            seconds=finished.took_ns / 1e9,
        )

    def _log(self, event: str, **fields: object) -> None:
        self._events.write(event, replica=self._guest.name, **fields)


class _Climb:
    """Executor of reclaim levels: it carries out each level on the guest and keeps the engine's
    answer to the current one.
    """

    def __init__(self, guest: GuestMemory, gauge: MemoryGauge, reason: str) -> None:
        self._guest = guest
        self._gauge = gauge
        self._reason = reason
        self._level: ReclaimLevel | None = None
        self._cap = NO_CAP
        self._mapped_bytes = 0
        self._sleeping: asyncio.Task[Answer] | None = None
        self._asleep = False

    def take(self, ask: Escalate) -> None:
        """Carry out a level: freeze, cap the KV granules, sleep or kill."""
        self._level = ask.level
        state = self._guest.state or GuestState()
        self._mapped_bytes = state.bytes_mapped
        if ask.level is ReclaimLevel.FREEZE:
            self._guest.hold(NO_CAP)
        elif ask.level in (ReclaimLevel.BALLOON, ReclaimLevel.RELEASE_KV):
            self._cap = LEAST_CAP
            if ask.level is ReclaimLevel.BALLOON and state.granule_bytes:
                left = max(0, state.bytes_mapped - ask.bytes_left)
                self._cap = max(LEAST_CAP, left // state.granule_bytes)
            self._guest.hold(self._cap)
        elif ask.level is ReclaimLevel.SLEEP and self._no_sleep is None:
            self._sleeping = asyncio.create_task(self._sleep(ask.bytes_left))
        elif ask.level is ReclaimLevel.KILL:
            self._guest.kill(self._reason)
            self._asleep = False

    def answer(self) -> Answer:
        """Return the engine's answer to the current level: bytes that it reports as freed,
        Unsupported, or None while there is none.
        """
        if self._level is ReclaimLevel.FREEZE:
            state = self._guest.state
            return EngineReport(0) if state is None or not state.in_step else None
        if self._level in (ReclaimLevel.BALLOON, ReclaimLevel.RELEASE_KV):
            return self._ballooned(self._guest.state)
        if self._level is ReclaimLevel.SLEEP:
            if self._no_sleep is not None or self._sleeping is None:
                return Unsupported(self._no_sleep or NO_SLEEP)
            return self._sleeping.result() if self._sleeping.done() else None
        return None

    def end(self) -> None:
        """Cancel a pending sleep call, and kill an engine that has given up its weights, so that it
        is not offered as a replica.
        """
        if self._sleeping is not None:
            self._sleeping.cancel()
        if self._asleep:
            self._guest.kill(f"{self._reason}; its weights are gone")

    @property
    def _no_sleep(self) -> str | None:
        """Reason why the engine cannot be asked to sleep, None if it can."""
        if not self._guest.can_sleep:
            return NO_SLEEP
        return None if self._gauge.sees_all else UNSEEN

    def _ballooned(self, state: GuestState | None) -> Answer:
        if state is None or not state.granule_bytes:
            return Unsupported("the guest does not say what KV memory it has")
        if state.granules_mapped > self._cap:
            return None
        return EngineReport(self._mapped_bytes - state.bytes_mapped)

    async def _sleep(self, bytes_left: int) -> Answer:
        self._asleep = True
        try:
            await self._guest.sleep()
        except RefusedError as error:
            self._asleep = False
            return Unsupported(str(error))
        except UnavailableError:
            return None  # The engine may hang: the next level follows after this one's time.
        able = self._guest.sleep_bytes
        return EngineReport(bytes_left if able is None else min(bytes_left, able))
