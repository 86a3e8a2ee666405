"""Weight updates of a node's engines: planned, fetched, applied and proven.

held ──δ──► … ──δ──► target       one folded update: versions between are never active here
base ──δ──► … ──δ──► target       where that is fewer bytes, or the held weights are not the version
another job's ──base──► target    a lease for another job; without a base its engine starts anew

`AnnouncedVersions` are the versions that the node knows of, of each job; they say which one a
replica needs next. A version means nothing without its job.

`WeightNetwork` is the node's part of the weight plane: the fetcher for its own replicas and, where
configured, the relay for its neighbours. `Updates` keeps one engine at the newest version; a
version counts only when the engine has proven it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import aiohttp

from rose.addresses import host_port
from rose.clock import utc_text
from rose.contract.weights import UpdateApplied
from rose.errors import ConfigError, RefusedError, RoseError, UnavailableError
from rose.logs.eventlog import EventLog, JsonlLog
from rose.node.config import NodeConfig
from rose.node.replica_client import (
    ReplicaClient,
    ReplicaHostBusyError,
    UnfitAdapterError,
    UnprovenError,
)
from rose.weight_distribution import Credentials, VersionServer
from weight_transfer import (
    CatalogError,
    ChunkStore,
    JobKeys,
    OnUpdate,
    SignatureError,
    WeightError,
    WrongBaseError,
    key_of,
)
from weight_transfer.catalog import Catalog, FetchPlan
from weight_transfer.errors import FanoutError, FetchError, IndexFormatError
from weight_transfer.fetch import ChunkFetcher, DownloadLimits, PublisherClient, fetch_version
from weight_transfer.fetch.nccl import GroupLead, Membership, join_group, lead
from weight_transfer.fetch.session import SourceSession

# Number of announced deltas kept for each job; a replica further behind plans by the publisher's
# catalog.
STEPS_KEPT = 4_096


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """One announced weight version: its job, its number, its parent version and the URL that serves
    it.

    parent: the version that its delta builds on; the version itself for a base, which builds on
    nothing.
    """

    job: str
    version: int
    parent: int
    url: str


class AnnouncedVersions:
    """Weight versions that the scheduler announced, by job and parent version; version 0 is the
    job's initial model.
    """

    def __init__(self) -> None:
        self._by_parent: dict[str, dict[int, KnownVersion]] = {}
        self._newest: dict[str, KnownVersion] = {}

    def add(self, known: KnownVersion) -> None:
        """Record an announced version; a repeated call changes nothing, and a base forgets the
        job's earlier deltas.
        """
        steps = self._by_parent.setdefault(known.job, {})
        if known.parent == known.version:
            # The run has restarted: no earlier delta leads to its versions.
            steps.clear()
        else:
            steps[known.parent] = known
        if len(steps) > STEPS_KEPT:
            del steps[min(steps)]
        newest = self._newest.get(known.job)
        if newest is None or known.version >= newest.version:
            self._newest[known.job] = known

    @property
    def only_job(self) -> str:
        """Name of the job that all known versions belong to; "" if there are none, or several jobs
        have some.
        """
        return next(iter(self._newest)) if len(self._newest) == 1 else ""

    def newest_of(self, job: str) -> KnownVersion | None:
        """Return the job's newest announced version, None if none was announced."""
        return self._newest.get(job)

    def after(self, version: int, job: str = "") -> KnownVersion | None:
        """Return the announced delta of the job that builds on `version`, None without one. An
        empty `job` means the only known job.
        """
        return self._by_parent.get(job or self.only_job, {}).get(version)


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Objects with which all replicas of a node fetch weights: HTTP session, chunk fetcher,
    announced versions, verify keys and publisher client.
    """

    session: aiohttp.ClientSession
    fetcher: ChunkFetcher
    chain: AnnouncedVersions
    keys: JobKeys | None
    reader: PublisherClient

    @property
    def receiving(self) -> DownloadLimits:
        return self.fetcher.receiving


@dataclass(frozen=True, slots=True)
class FetchedUpdate:
    """Result of a fetch: manifest files that lead to `version`, in order, with all their chunks on
    disk.

    wire_bytes: bytes that were downloaded. on_update: treatment of turns in flight that the last
    manifest asks for.
    """

    version: int
    manifests: tuple[Path, ...]
    wire_bytes: int
    on_update: OnUpdate


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """Request to bring a replica to the version `target`.

    held: version of the target's job that the replica has, None if its weights are another job's.
    rebase: True if its weights differ from what `held` says, so that a base is needed.
    """

    replica: str
    held: int | None
    target: KnownVersion
    rebase: bool = False


async def fetch_update(
    source: WeightSource, request: UpdateRequest, on_reject: Callable[[str], None], hold: set[str]
) -> FetchedUpdate:
    """Download the manifests and chunks that lead the replica from its weights to the target, and
    return them.

    on_reject: called with the name of each file that fails verification. hold: receives the names
    of the files that must not be evicted. Raises RoseError or WeightError; CatalogError only if a
    base is needed and there is none.
    """
    url, job = request.target.url, request.target.job
    key = key_of(source.keys, job)
    async with source.reader.lease(url, request.replica, request.held or 0):
        steps = (await _plan(source, request)).steps
        paths, wire_bytes, on_update = [], 0, OnUpdate.RECOMPUTE
        for version, base in steps:
            fetched = await fetch_version(
                source.fetcher,
                url,
                job,
                version,
                key,
                on_reject,
                hold,
                base=base,
                on_the_way=version != steps[-1][0],
            )
            paths.append(fetched.manifest_path)
            wire_bytes += fetched.wire_bytes
            on_update = fetched.manifest.on_update
    return FetchedUpdate(steps[-1][0], tuple(paths), wire_bytes, on_update)


async def _plan(source: WeightSource, request: UpdateRequest) -> FetchPlan:
    target = request.target
    if request.rebase or request.held is None:
        return rebased(
            await source.reader.catalog(target.url, target.job), request.held, target.version
        )
    if target.parent == request.held:
        return FetchPlan(None, (target.version,), 0)
    try:
        catalog = await source.reader.catalog(target.url, target.job)
        return catalog.plan(request.held, target.version)
    except (FetchError, IndexFormatError, CatalogError):
        # Announced versions are known without a catalog, one step at a time.
        step = source.chain.after(request.held, target.job)
        if step is None:
            raise
        return FetchPlan(None, (step.version,), 0)


def _is_of_signature(error: BaseException | None) -> bool:
    """Return True if an error, or what caused it, is a signature of another key, or none."""
    return error is not None and (
        isinstance(error, SignatureError) or _is_of_signature(error.__cause__)
    )


def rebased(catalog: Catalog, held: int | None, target: int) -> FetchPlan:
    """Return the plan with the fewest bytes that leads to `target` from a base newer than `held`.
    Raises CatalogError if there is none.
    """
    after = -1 if held is None else held
    newer = {version: size for version, size in catalog.bases.items() if version > after}
    return Catalog(newer, catalog.deltas).plan(None, target)


_log = logging.getLogger(__name__)


class WeightNetwork:
    """HTTP connections with which a node fetches weights, and its relay server if one is
    configured.

    Raises ConfigError for credentials that cannot be used.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        leader = [config.fanout.leader] if config.fanout and config.fanout.leader else []
        credentials: Credentials = config.transport.credentials(config.certificates)
        self._credentials = credentials.naming(leader)
        if relay := config.relay:
            self._credentials = replace(self._credentials, insecure=relay.insecure)
            self._credentials.check_exposure(relay.host)
        self._session: SourceSession | None = None
        self._server: VersionServer | None = None
        self._source: WeightSource | None = None
        self._joining: asyncio.Task[None] | None = None

    @property
    def damaged_files(self) -> int:
        """Number of chunk and manifest files that were damaged on this node's disk since it
        started.
        """
        return self._source.receiving.store.damaged_files if self._source else 0

    @property
    def relay_url(self) -> str:
        """URL at which neighbours fetch weights from this node; empty if it has no relay."""
        relay = self._config.relay
        return f"{self._credentials.scheme}://{host_port(relay.host, relay.port)}" if relay else ""

    async def start(
        self, replicas: aiohttp.ClientSession, chain: AnnouncedVersions
    ) -> WeightSource:
        """Open the connections, start the relay if there is one, and return the source of weights
        for this node's replicas. Raises ConfigError.

        replicas: HTTP session to this node's own engines.
        """
        config = self._config
        self._session = self._credentials.sources(config.transport.buckets)
        store = ChunkStore(config.weights)
        fetcher = ChunkFetcher(
            self._session, DownloadLimits(store, config.receiver.caps), self.relay_url
        )
        group = config.fanout
        try:
            leading = lead(group.size) if group and group.rank == 0 else None
        except FanoutError as error:
            raise ConfigError(str(error)) from error
        if config.relay:
            host, port = config.relay.host, config.relay.port
            self._server = VersionServer(
                store, port, fetcher, self._credentials, host, lead=leading
            )
            await self._server.start()
        if group:
            mine = Membership(group.rank, group.size, group.leader, group.device)
            self._joining = asyncio.create_task(self._join(fetcher, mine, leading))
        keys = config.keys
        self._source = WeightSource(
            replicas, fetcher, chain, keys, PublisherClient(self._session, config.node, keys)
        )
        return self._source

    def enrol(self, members: Sequence[str]) -> None:
        """Set the URLs of the cluster's relays, from which this node's fetcher downloads chunks."""
        if self._source:
            self._source.fetcher.enrol(members)

    def follow(self, known: KnownVersion) -> None:
        """Allow the relay to fetch and serve any part of an announced version, even if no engine
        here needs it.
        """
        # A job without a key is refused, and told, where a replica needs its version.
        if self._source:
            with contextlib.suppress(SignatureError):
                key = key_of(self._source.keys, known.job)
                self._source.fetcher.follow(known.job, known.url, key)

    async def _join(
        self, fetcher: ChunkFetcher, mine: Membership, leading: GroupLead | None
    ) -> None:
        """Join the NCCL group of GPUs that exchanges chunks; until all members are there, or after
        a failure, weights come over HTTP.
        """
        assert self._session is not None
        try:
            fetcher.group = await join_group(self._session, mine, leading)
        except Exception as error:  # noqa: BLE001 - whatever NCCL or a driver says: there is no group
            _log.warning("joins no group of GPUs, weights come over HTTP: %s", error)

    async def close(self) -> None:
        """Close all connections and the relay; downloaded files stay on disk."""
        if self._joining:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        if self._source:
            await self._source.fetcher.close()
            self._source.receiving.close()
        if self._server:
            await self._server.close()
        if self._session:
            await self._session.close()


MAX_APPLY_FAILURES = 3
FIRST_PAUSE_S = 0.3
MAX_PAUSE_S = 5.0


class UpdateOwner(Protocol):
    """Owner of an engine whose weights are updated: it is told the result of updates."""

    def activated(self, job: str, version: int) -> None:
        """Handle the news that the engine has proven to run this version of the job's weights."""

    def unproven(self, version: int, why: str) -> None:
        """End the engine, because it is not known which weights it runs."""

    def start_anew(self, why: str) -> None:
        """Restart the engine with the model of the job that leases it."""


class Updates:
    """Background task that keeps one engine at the newest weight version of the job that leases it.

    version, job: what the engine has proven to run; 0 and "" if it runs its model folder's weights.
    late: why the last try to bring a newer version failed; "" after one that did not.
    Before the first lease it follows the job of the engine's weights. The weights of another job
    are replaced through a base; without one the engine is restarted.

    A version that cannot be fetched is tried again with growing pauses, and the replica stays
    stale. An engine that holds other weights than its version says is given a base. An engine that
    cannot prove a version is ended.
    """

    def __init__(
        self,
        replica: str,
        kind: str,
        client: ReplicaClient,
        source: WeightSource,
        activations: JsonlLog,
        events: EventLog,
        owner: UpdateOwner,
    ) -> None:
        self.version = 0
        self.job = ""
        self._replica = replica
        self._kind = kind
        self._client = client
        self._source = source
        self._activations = activations
        self._events = events
        self._owner = owner
        self._wanted = ""
        self._latest = 0
        self.late = ""
        self._other_model = False
        self._life = 0
        self._up = False
        self._refusals = 0
        self._rebase = False
        # Version that does not fit the engine, which is not asked again.
        self._unfit: KnownVersion | None = None
        self._wake = asyncio.Event()

    def serve(self, job: str, latest: int, *, other_model: bool = False) -> None:
        """Set the job to follow, which leases the replica, and wake the task if it changed.

        latest: the job's newest version by the scheduler. other_model: True if the engine runs
        another model of the same architecture.
        """
        changed = (job, other_model) != (self._wanted, self._other_model)
        self._wanted, self._latest, self._other_model = job, latest, other_model
        if changed:
            self.late = ""
            self._refusals = 0
            self._rebase = False
            self._wake.set()

    def engine_up(self, version: int, job: str = "") -> None:
        """Record a healthy engine and the version and job that it reports: 0 and "" for a new one,
        the proven ones for an adopted one.
        """
        self._life += 1
        self.job = job
        self._unfit = None
        self._up = True
        self._refusals = 0
        self._rebase = False
        self.version = version
        self._wake.set()

    def engine_down(self) -> None:
        """Forget the version and job of an engine that has ended; answers to calls of it are
        ignored.
        """
        self._life += 1
        self._up = False
        self.version = 0
        self.job = self.late = ""

    def wake(self) -> None:
        """Wake the update task, so that it looks for a version to fetch, because one was
        announced.
        """
        self._wake.set()

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            self._wake.clear()
            known = self._due() if self._up else None
            if known is None:
                await self._wake.wait()
            elif await self._try(known):
                pause_s = FIRST_PAUSE_S
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    @property
    def _foreign(self) -> bool:
        """True if the engine's weights are not known to be a version of the leasing job."""
        if not self._wanted:
            return False
        # An engine that does not name the job of its version is not trusted to have this job's.
        unnamed = self.version > 0 and not self.job and not self._source.chain.only_job
        return self._other_model or unnamed or self.job not in ("", self._wanted)

    def _unwanted(self, known: KnownVersion) -> bool:
        """Return True if another job has leased the replica since this version was requested."""
        return bool(self._wanted) and known.job != self._wanted

    def _due(self) -> KnownVersion | None:
        """Return the version that the engine should be updated to, None if it is up to date;
        restart the engine if the leasing job is still at version 0.
        """
        chain = self._source.chain
        newest = chain.newest_of(self._wanted or self.job or chain.only_job)
        if self._foreign:
            if newest is None and not self._latest:
                self._owner.start_anew(f"job {self._wanted} is at version 0")
        elif newest is not None and newest.version <= self.version:
            return None
        return None if newest == self._unfit else newest

    async def _try(self, known: KnownVersion) -> bool:
        """Return True if one update ended so that the next may begin at once; log any error and
        return False, so that it is tried again after a pause.
        """
        try:
            # Until the engine has read them, the files of this version are not to be evicted.
            with self._source.receiving.cache.hold() as hold:
                return await self._bring(known, hold)
        except Exception as error:  # noqa: BLE001 - recorded, and tried again after a pause
            self._log("update_broken", version=known.version, message=repr(error)[:300])
            return False

    async def _bring(self, known: KnownVersion, hold: set[str]) -> bool:
        source, life, foreign = self._source, self._life, self._foreign
        held = None if foreign else self.version
        request = UpdateRequest(self._replica, held, known, self._rebase)
        try:
            fetched = await fetch_update(source, request, self._rejected, hold)
        except (RoseError, WeightError) as error:
            event = "signature_refused" if _is_of_signature(error) else "version_not_fetched"
            self._log(event, version=known.version, message=str(error))
            if isinstance(error, CatalogError) and life == self._life:
                if foreign:
                    self._restart_for(known, str(error))
                elif request.rebase:
                    self._refused(known.version, str(error))
            return False
        if life != self._life or self._unwanted(known):
            return True
        return await self._apply(known, fetched, life, foreign=foreign)

    async def _apply(
        self, known: KnownVersion, fetched: FetchedUpdate, life: int, *, foreign: bool
    ) -> bool:
        # No KV of another job's weights is kept.
        on_update = OnUpdate.RECOMPUTE if foreign else fetched.on_update
        chunks = self._source.receiving.store.chunks_dir
        try:
            applied = await self._client.apply(fetched.manifests, chunks, on_update)
        except (WrongBaseError, RefusedError, UnavailableError) as error:
            if life == self._life:
                self._not_taken(known, fetched.version, error, foreign=foreign)
            if isinstance(error, UnavailableError) and life == self._life:
                await self._look(fetched.version, life)
            return False
        self._record(known.job, fetched.version, applied, fetched.wire_bytes)
        if life == self._life:
            if applied.ok and applied.version == fetched.version:
                self._holds(known.job, fetched.version)
            else:
                why = f"engine reports version {applied.version} without proof"
                self._unproven(fetched.version, why)
        return True

    def _restart_for(self, known: KnownVersion, why: str) -> None:
        """Restart the engine with the leasing job's model, because it cannot be updated to that
        job's weights.
        """
        if self._foreign and known.job == self._wanted:
            self._owner.start_anew(why)

    def _not_taken(
        self, known: KnownVersion, version: int, error: Exception, *, foreign: bool
    ) -> None:
        match error:
            case WrongBaseError() if foreign:
                self._restart_for(known, str(error))
            case WrongBaseError() if not self._rebase:
                # A base that does not help either is refused like any version.
                self._log("wrong_base", version=version, message=str(error))
                self._rebase = True
            case UnprovenError():
                self._unproven(version, str(error))
            case ReplicaHostBusyError():
                # The version is tried again when the host has less to do; until then the guest
                # serves on.
                self._log("host_busy", version=version, message=str(error))
            case UnfitAdapterError():
                # The engine is sound, and serves on with the version that it has.
                self._unfit = known
                self._log("version_refused", version=version, message=str(error))
            case RefusedError() | UnavailableError() if self._unwanted(known):
                # The engine rightly refuses weights of a job that no longer leases it.
                self._log("update_late", version=version, message=str(error))
            case _:
                self._refused(version, str(error))

    async def _look(self, version: int, life: int) -> None:
        """Ask the replica which version it runs after an update whose reply was lost, and record
        it.
        """
        try:
            account = await self._client.state()
        except UnavailableError:
            return
        if life != self._life:
            return
        if not account.proven:
            self._unproven(version, "it does not know which weights it runs")
        elif account.adapters:
            # The job that was activated last may be another offer's.
            if self._wanted in account.adapters:
                self._holds(self._wanted, account.adapters[self._wanted])
        elif (account.job or self.job, account.policy_version) != (self.job, self.version):
            self._holds(account.job or self.job, account.policy_version)

    def _holds(self, job: str, version: int) -> None:
        self._refusals = 0
        self._rebase = False
        if job == self._wanted:
            self._other_model = False
        self.job, self.version, self.late = job, version, ""
        self._owner.activated(job, version)

    def _refused(self, version: int, message: str) -> None:
        self._log("version_refused", version=version, message=message)
        self._refusals += 1
        if self._refusals >= MAX_APPLY_FAILURES:
            self._unproven(version, message)

    def _unproven(self, version: int, why: str) -> None:
        self._log("quarantined", version=version, message=why)
        self.engine_down()
        self._owner.unproven(version, why)

    def _record(self, job: str, version: int, applied: UpdateApplied, wire_bytes: int) -> None:
        self._activations.write(
            {
                "time": utc_text(time.time()),
                "t_s": time.monotonic(),
                "replica": self._replica,
                "kind": self._kind,
                "job": job,
                "version": version,
                "digest_ok": applied.digest_ok,
                "probe_ok": applied.probe_ok,
                "probe_max_abs_diff": applied.probe_max_abs_diff,
                "pause_s": applied.pause_s,
                "apply_s": applied.apply_s,
                "wire_bytes": wire_bytes,
                "changed": applied.changed_elements,
            }
        )

    def _rejected(self, name: str) -> None:
        self._log("chunk_rejected", chunk=name)

    def _log(self, event: str, **fields: object) -> None:
        if "message" in fields:
            self.late = f"version {fields['version']}: {fields['message']}"
        self._events.write(event, replica=self._replica, **fields)
