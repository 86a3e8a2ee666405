"""One replica of a node: its engine, its lease and its policy version."""

import asyncio
import time
from collections.abc import Callable

import aiohttp

from rose.errors import RefusedError, RoseError, UnavailableError
from rose.eventlog import EventLog, JsonlLog
from rose.node.chain import KnownVersion, VersionChain
from rose.node.config import ReplicaConfig
from rose.node.lease import HeldLease
from rose.node.replica_client import Applied, ReplicaClient
from rose.node.supervisor import EngineState, Supervisor
from rose.publish import fetch_version
from weight_transfer import ChunkStore, VerifyKey, WeightError

MAX_APPLY_FAILURES = 5
RETRY_PAUSE_S = 0.3


class Replica:
    """Carries out leases and versions. `changed` is called when the scheduler should know more."""

    def __init__(
        self,
        config: ReplicaConfig,
        supervisor: Callable[[Callable[[EngineState], object]], Supervisor],
        session: aiohttp.ClientSession,
        store: ChunkStore,
        chain: VersionChain,
        verify_key: VerifyKey | None,
        activations: JsonlLog,
        events: EventLog,
        changed: Callable[[], None],
    ) -> None:
        self.config = config
        self.url = f"http://127.0.0.1:{config.port}"
        self.lease = HeldLease()
        self.version = 0
        self.quarantined = False
        self.supervisor = supervisor(self._entered)
        self._client = ReplicaClient(session, self.url)
        self._session = session
        self._store = store
        self._chain = chain
        self._verify_key = verify_key
        self._activations = activations
        self._events = events
        self._changed = changed
        self._wake = asyncio.Event()

    @property
    def offered(self) -> bool:
        """Whether its capacity may be offered at all."""
        healthy = self.supervisor.state is EngineState.HEALTHY
        return healthy and not self.quarantined

    @property
    def caught_up(self) -> bool:
        """Whether it runs the newest version that this node knows."""
        return self.version >= self._chain.latest

    def lease_active(self) -> bool:
        """Whether its guest may run, as far as leases go."""
        return self.lease.active(time.monotonic())

    def wake(self) -> None:
        """A new version is known."""
        self._wake.set()

    async def grant(self, epoch: int, ttl_s: float) -> None:
        """Take a lease or its renewal."""
        fresh = epoch > self.lease.epoch
        if not self.lease.grant(epoch, ttl_s, time.monotonic()) or not fresh:
            return
        self._log("lease_taken", epoch=epoch)
        try:
            await self._client.admit(epoch)
        except (RefusedError, UnavailableError) as error:
            self._log("admit_failed", message=str(error))

    async def release(self, epoch: int, reason: str) -> int:
        """End the lease and its turns; returns how many turns were ended."""
        if not self.lease.end(epoch):
            return 0
        aborted = 0
        try:
            aborted = await self._client.drain(epoch, reason)
        except (RefusedError, UnavailableError) as error:
            self._log("drain_failed", message=str(error))
        self._log("lease_ended", epoch=epoch, reason=reason, aborted=aborted)
        self._changed()
        return aborted

    async def keep_current(self) -> None:
        """Bring each version to the engine, in order, for as long as the node runs."""
        failures = 0
        while True:
            known = self._chain.after(self.version)
            if not self.offered or known is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                await self._bring(known)
                failures = 0
            except (RoseError, WeightError) as error:
                failures += 1
                self._log("version_failed", version=known.version, message=str(error))
                if failures >= MAX_APPLY_FAILURES:
                    self._quarantine()
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _bring(self, known: KnownVersion) -> None:
        fetched = await fetch_version(
            self._session, known.url, known.version, self._store, self._verify_key, self._rejected
        )
        applied = await self._client.apply(fetched.manifest_path, self._store.chunks_dir)
        self._record(known.version, applied, fetched.wire_bytes)
        if not applied.ok:
            self._quarantine()
            return
        self.version = applied.version
        self._changed()

    def _record(self, version: int, applied: Applied, wire_bytes: int) -> None:
        self._activations.write(
            {
                "t_s": time.monotonic(),
                "replica": self.config.id,
                "kind": self.config.kind,
                "version": version,
                "digest_ok": applied.digest_ok,
                "probe_ok": applied.probe_ok,
                "probe_max_abs_diff": applied.probe_max_abs_diff,
                "pause_s": applied.pause_s,
                "apply_s": applied.apply_s,
                "wire_bytes": wire_bytes,
                "changed": applied.changed,
            }
        )

    def _rejected(self, name: str) -> None:
        self._log("chunk_rejected", chunk=name)

    def _quarantine(self) -> None:
        """Out of service: it could not prove what it runs."""
        self.quarantined = True
        self._log("quarantined", version=self.version)
        self._changed()

    async def _entered(self, state: EngineState) -> None:
        if state is EngineState.STARTING:
            # A new engine starts from the base and has proven nothing wrong yet.
            self.version = 0
            self.quarantined = False
        self._log("engine_state", state=state.value)
        self._wake.set()
        self._changed()

    def _log(self, event: str, **fields: object) -> None:
        self._events.write(event, replica=self.config.id, **fields)
