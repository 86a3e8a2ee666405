"""Carries out what a replica's tenancy asks for: admission, drain, word to the scheduler."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from rose.errors import RefusedError, UnavailableError
from rose.eventlog import EventLog
from rose.node.replica_client import ReplicaClient
from rose.node.tenancy import Admit, Drain, Ended, Step, TakenBack, TenancyCore

MAX_ADMIT_FAILURES = 6
MAX_DRAIN_FAILURES = 2
RETRY_PAUSE_S = 0.3
UNANSWERED = "engine does not admit"


class Tenant:
    """The shell of one `TenancyCore`.

    tell: takes what the scheduler must hear (`TakenBack`, `Ended`).
    on_broken: called with a reason when the engine is healthy but obeys no more.
    """

    def __init__(
        self,
        replica: str,
        client: ReplicaClient,
        events: EventLog,
        tell: Callable[[TakenBack | Ended], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self.core = TenancyCore()
        self._replica = replica
        self._client = client
        self._events = events
        self._tell = tell
        self._on_broken = on_broken
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._failures = 0
        self._aborted = 0

    def lease_epoch(self) -> int | None:
        """Under which lease turns may run now; safe to ask from another thread."""
        held = self.core.held
        epoch = held.epoch
        return epoch if held.active(time.monotonic()) else None

    def grant(self, epoch: int, ttl_s: float) -> None:
        """Take a lease or its renewal."""
        self.core.grant(epoch, ttl_s, time.monotonic())
        self._wake.set()

    def release(self, epoch: int, reason: str) -> None:
        """End the lease and its turns."""
        self.core.release(epoch, reason)
        self._wake.set()

    def take_back(self, reason: str) -> None:
        """End the lease for a reason of the node's own."""
        taken = self.core.take_back(reason)
        if taken is not None:
            self._quiet.clear()
            self._told(taken)
        self._wake.set()

    def engine_up(self, epoch: int, admitting: bool) -> None:
        """A healthy engine is there, new or adopted."""
        self.core.engine_up(epoch, admitting)
        self._wake.set()

    def engine_down(self) -> None:
        """It is gone."""
        self.core.engine_down()
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            step = self.core.next(time.monotonic(), self._aborted)
            if step is None and self.core.vacant:
                self._quiet.set()
            else:
                self._quiet.clear()
            if step is None:
                await self._sleep()
            else:
                await self._carry_out(step)

    async def settle(self, patience_s: float) -> None:
        """Return once nobody's turns run here, or patience is at its end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._quiet.wait()

    async def _sleep(self) -> None:
        held = self.core.held
        patience_s = max(0.0, held.until_s - time.monotonic()) if held.open else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._wake.wait()

    async def _carry_out(self, step: Step) -> None:
        match step:
            case Admit():
                await self._admit(step)
            case Drain():
                await self._drain(step)
            case TakenBack() | Ended():
                self._told(step)

    def _told(self, step: TakenBack | Ended) -> None:
        if isinstance(step, TakenBack):
            self._log("lease_taken_back", epoch=step.epoch, reason=step.reason)
        else:
            self._aborted = 0
            self._log("lease_ended", epoch=step.epoch, reason=step.reason, aborted=step.aborted)
        self._tell(step)

    async def _admit(self, step: Admit) -> None:
        life = self.core.life
        try:
            await self._client.admit(step.epoch)
        except (RefusedError, UnavailableError) as error:
            self._log("admit_failed", epoch=step.epoch, message=str(error))
            await self._failed(MAX_ADMIT_FAILURES)
            return
        self._failures = 0
        self.core.admitted(step.epoch, life)
        self._log("lease_taken", epoch=step.epoch)

    async def _drain(self, step: Drain) -> None:
        life = self.core.life
        try:
            self._aborted = await self._client.drain(step.epoch, step.reason)
        except (RefusedError, UnavailableError) as error:
            self._log("drain_failed", epoch=step.epoch, message=str(error))
            await self._failed(MAX_DRAIN_FAILURES)
            return
        self._failures = 0
        self.core.drained(life)

    async def _failed(self, limit: int) -> None:
        """An engine that does not obey is ended: nothing else takes its turns from it."""
        self._failures += 1
        if self._failures < limit:
            await asyncio.sleep(RETRY_PAUSE_S)
            return
        self._failures = 0
        self.core.engine_down()
        self._on_broken(UNANSWERED)

    def _log(self, event: str, **fields: object) -> None:
        self._events.write(event, replica=self._replica, **fields)
