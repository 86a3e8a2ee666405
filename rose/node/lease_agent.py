"""Lease agent of a replica: carries out its lease state machine, and checks the scheduler's orders.

It opens and drains the engine's admission and reports to the scheduler. Orders of a scheduler, or
of anything that answers in its place, are checked before they are obeyed.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable

from rose.addresses import checked_url
from rose.clock import boot_clock_s
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.logs.eventlog import EventLog
from rose.node.grants.caps import check_caps
from rose.node.lease_fsm import (
    Admit,
    Drain,
    Ended,
    EngineAdmitted,
    EngineDown,
    EngineDrained,
    EngineUp,
    Event,
    Granted,
    LeaseStateMachine,
    LeaseTakenBack,
    LeaseTick,
    Released,
    Revoked,
    SwitchBegun,
)
from rose.node.replica_client import ReplicaClient
from rose.rpc import rose_pb2

# A scheduler renews each second: a lease that lives for much longer would outlive its node's sight.
MAX_LEASE_TTL_S = 60.0
MAX_EPOCH = MAX_VERSION = 2**53
MAX_NEIGHBOURS = 4_096
MAX_NAME_CHARS = 253


def check_order(command: rose_pb2.NodeCommand) -> None:
    """Raise `RefusedError` or `ConfigError`, in a line, for an order that is not to be obeyed."""
    match command.WhichOneof("command"):
        case "lease":
            _check_lease(command.lease)
        case "version":
            _check_version(command.version)
        case "relays":
            _check_relays(command.relays)
        case "caps":
            check_caps(command.caps)


def _check_lease(lease: rose_pb2.Lease) -> None:
    if lease.epoch > MAX_EPOCH:
        raise RefusedError(f"epoch {lease.epoch} of {lease.replica} is above 2^53")
    if max(len(lease.job), len(lease.model)) > MAX_NAME_CHARS:
        raise RefusedError(f"the job of {lease.replica} has a name of over {MAX_NAME_CHARS}")
    if not (math.isfinite(lease.ttl_s) and 0 < lease.ttl_s <= MAX_LEASE_TTL_S):
        raise RefusedError(
            f"a lease of {lease.replica} for {lease.ttl_s} s; it may live for up to"
            f" {MAX_LEASE_TTL_S:.0f} s"
        )


def _check_version(version: rose_pb2.Version) -> None:
    if not (version.parent <= version.version <= MAX_VERSION and version.version):
        raise RefusedError(
            f"version {version.version} with parent {version.parent}; versions grow, up to 2^53"
        )
    checked_url(version.url, f"the url of version {version.version}")


def _check_relays(relays: rose_pb2.Relays) -> None:
    if len(relays.urls) > MAX_NEIGHBOURS:
        raise RefusedError(f"{len(relays.urls)} relays at once; a cluster has {MAX_NEIGHBOURS}")
    for url in relays.urls:
        try:
            checked_url(url, "a neighbour's relay")
        except ConfigError as error:
            raise RefusedError(f"the cluster's relays stay as they were: {error}") from error


MAX_ADMIT_FAILURES = 6
MAX_DRAIN_FAILURES = 2
RETRY_PAUSE_S = 0.3
UNANSWERED = "engine does not admit"


class LeaseAgent:
    """The shell of one `LeaseStateMachine`.

    tell: takes what the scheduler must hear (`LeaseTakenBack`, `Ended`).
    on_broken: called with a reason when the engine is healthy but obeys no more.
    """

    def __init__(
        self,
        replica: str,
        client: ReplicaClient,
        events: EventLog,
        tell: Callable[[LeaseTakenBack | Ended], None],
        on_broken: Callable[[str], None],
        clock: Callable[[], float] = boot_clock_s,
    ) -> None:
        self.core = LeaseStateMachine()
        self._clock = clock
        self._replica = replica
        self._client = client
        self._events = events
        self._tell = tell
        self._on_broken = on_broken
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._failures = 0
        self.job = ""

    def lease_epoch(self) -> int | None:
        """Return the epoch of the lease under which turns may run now (any thread)."""
        status = self.core.status()
        return status.epoch if status.active(self._clock()) else None

    def held(self) -> rose_pb2.HeldLease | None:
        """Return the lease that holds now, for a scheduler that does not know it."""
        status, now_s = self.core.status(), self._clock()
        if not status.active(now_s):
            return None
        left_s = status.until_s - now_s
        return rose_pb2.HeldLease(job=self.job, epoch=status.epoch, left_s=left_s)

    def grant(self, epoch: int, ttl_s: float, job: str = "") -> bool:
        """Take a lease of a job or its renewal; whether it is not one of the past."""
        if epoch < self.core.status().epoch:
            return False
        self.job = job
        self._happened(Granted(epoch, ttl_s))
        return True

    def switching(self, for_s: float) -> None:
        """Prepare for a new start of the engine for the lease's job."""
        self._happened(SwitchBegun(for_s))
        self._happened(EngineDown())

    def release(self, epoch: int, reason: str) -> None:
        """End the lease and its turns."""
        self._happened(Released(epoch, reason))

    def take_back(self, reason: str) -> None:
        """End the lease for a reason of the node's own."""
        self._happened(Revoked(reason))

    def engine_up(self, epoch: int, admitting: bool) -> None:
        """Take a healthy engine, new or adopted."""
        self._happened(EngineUp(epoch, admitting))

    def engine_down(self) -> None:
        self._happened(EngineDown())

    async def run(self) -> None:
        while True:
            self._wake.clear()
            match self._step(LeaseTick()):
                case Admit() as call:
                    await self._admit(call)
                case Drain() as call:
                    await self._drain(call)
                case None:
                    await self._sleep()

    async def settle(self, patience_s: float) -> None:
        """Return once nobody's turns run here, or patience is at its end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._quiet.wait()

    async def _sleep(self) -> None:
        until_s = self.core.status().until_s
        patience_s = max(0.0, until_s - self._clock()) if until_s else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._wake.wait()

    def _happened(self, event: Event) -> None:
        """Step the core, then wake the task that calls the engine."""
        self._step(event)
        self._wake.set()

    def _step(self, event: Event) -> Admit | Drain | None:
        """Tell what there is to tell; returns the call that the engine is to get."""
        call: Admit | Drain | None = None
        for action in self.core.step(event, self._clock()):
            match action:
                case LeaseTakenBack() | Ended():
                    self._told(action)
                case Admit() | Drain():
                    call = action
        if call is None and self.core.status().vacant:
            self._quiet.set()
        else:
            self._quiet.clear()
        return call

    def _told(self, word: LeaseTakenBack | Ended) -> None:
        if isinstance(word, LeaseTakenBack):
            self._log("lease_taken_back", epoch=word.epoch, reason=word.reason)
        else:
            self._log("lease_ended", epoch=word.epoch, reason=word.reason, aborted=word.aborted)
        self._tell(word)

    async def _admit(self, call: Admit) -> None:
        try:
            await self._client.admit(call.epoch, self.job)
        except (RefusedError, UnavailableError) as error:
            self._log("admit_failed", epoch=call.epoch, message=str(error))
            await self._failed(MAX_ADMIT_FAILURES)
            return
        self._failures = 0
        self._step(EngineAdmitted(call.epoch, call.life))
        self._log("lease_taken", epoch=call.epoch)

    async def _drain(self, call: Drain) -> None:
        try:
            aborted = await self._client.drain(call.epoch, call.reason)
        except (RefusedError, UnavailableError) as error:
            self._log("drain_failed", epoch=call.epoch, message=str(error))
            await self._failed(MAX_DRAIN_FAILURES)
            return
        self._failures = 0
        self._step(EngineDrained(call.life, aborted))

    async def _failed(self, limit: int) -> None:
        """End an engine that does not obey: nothing else ends its turns."""
        if not self.core.status().engine_up:
            # The engine has ended meanwhile: call the next one.
            self._failures = 0
            return
        self._failures += 1
        if self._failures < limit:
            await asyncio.sleep(RETRY_PAUSE_S)
            return
        self._failures = 0
        self._step(EngineDown())
        self._on_broken(UNANSWERED)

    def _log(self, event: str, **fields: object) -> None:
        self._events.write(event, replica=self._replica, **fields)
