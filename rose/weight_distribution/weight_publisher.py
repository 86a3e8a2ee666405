"""Weight publisher, which a trainer calls after each update of its policy.

A version is durable first, then announced. A trainer that starts again goes on from its root, or
begins a chain of its own:

    start ── root and scheduler agree ──► resumed: restore, publish what follows
        └── a new root, or another run came between ──► publish_anew: a base, numbered on
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import grpc.aio

from rose.addresses import checked_bucket
from rose.errors import NotAnnouncedError, RefusedError, RunFencedError, UnavailableError
from rose.rpc import rose_pb2
from rose.rpc.leader_channel import LeaderChannel
from rose.security.certificates import CertificateFiles
from rose.security.roles import Role
from rose.tracing import current_trace
from rose.weight_distribution.credentials import OPEN, Credentials
from rose.weight_distribution.retention import Latest, RetentionTask
from rose.weight_distribution.runs import (
    WAIT_S,
    RunKeeper,
    RunRoot,
    reason_of,
    run_error,
    until_free,
)
from rose.weight_distribution.version_server import VersionServer
from weight_transfer import (
    Adapter,
    CatalogError,
    ChunkDigestError,
    ChunkStore,
    Manifest,
    ManifestError,
    OnUpdate,
    SigningKey,
    TensorBits,
    VersionPublisher,
    WeightError,
    newest_version,
    read_model_dir,
    restore,
)
from weight_transfer.catalog import ReadLeases
from weight_transfer.format.delta_codec import Level
from weight_transfer.publish.bucket_copy import BucketCopy
from weight_transfer.publish.level import AUTO, LevelChoice, level_for
from weight_transfer.publish.restore import way_to
from weight_transfer.serve import Signer

if TYPE_CHECKING:
    from rose.rpc.rose_pb2_grpc import SchedulerAsyncStub

R = TypeVar("R")
_log = logging.getLogger(__name__)

# Longest wait for a scheduler that restarts.
ANNOUNCE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Receipt:
    """Costs of a published version.

    wire_bytes: encoded chunks and manifest, as one reader fetches them. full_bytes: all weights
    unencoded. density: share of weights that changed. publish_s: seconds from the call to the
    announcement. level: codec level.
    """

    version: int
    wire_bytes: int
    full_bytes: int
    density: float
    publish_s: float
    level: Level = Level.FAST


@dataclass(frozen=True, slots=True)
class Begun:
    """State of the job and of its root folder at a publisher's start.

    latest: greatest version number that is used up, 0 before the first; the next version is
    greater. resumed: version that can be restored from the root and continued, None if a new base
    must be published. why_anew: reason why it is None, as text.
    """

    latest: int
    resumed: int | None = None
    why_anew: str = ""


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Settings of a WeightPublisher beside its job, scheduler, root, port and key.

    host: address of this machine that all nodes reach. credentials: token and certificates that
    nodes must show. certificates: the trainer's own, used for the scheduler, and for nodes where
    `credentials` names none. insecure: True allows a server that other machines reach without
    certificates. on_update: treatment of turns in flight when a replica takes a version. level:
    `fast`, `compact` (fewer bytes, more work), or `auto`, by the rate at which readers take chunks.
    model: name of version 0 on nodes; empty: the model that replicas start with. weight: share of
    guests beside other jobs. max_guests: most guests that the job may lease at once, 0 for no
    limit. run: label of the run in messages. take_over: fence a trainer that has the job, instead
    of being refused. checkpoint: folder of version 0, from which a run is restored until its root
    has a base. bucket: s3://BUCKET/PATH, gs://, az:// or file:///PATH that gets a copy of the root,
    from which nodes read instead of from this machine.
    """

    host: str = "127.0.0.1"
    credentials: Credentials = OPEN
    certificates: CertificateFiles | None = None
    insecure: bool = False
    on_update: OnUpdate = OnUpdate.RECOMPUTE
    level: LevelChoice = AUTO
    model: str = ""
    weight: float = 1.0
    max_guests: int = 0
    run: str = ""
    take_over: bool = False
    checkpoint: Path | None = None
    bucket: str = ""


DEFAULTS = PublisherSettings()


def trainers_channel(scheduler: str, certificates: CertificateFiles | None) -> LeaderChannel:
    """Return a new gRPC channel from a trainer to the leading scheduler.

    Raises ConfigError for a certificate of another role.
    """
    if certificates is not None:
        certificates.insist(Role.TRAINER)
    return LeaderChannel(scheduler, "the publisher's scheduler", certificates)


class WeightPublisher:
    """Publisher of one job's versions: it stores each durably and announces it to the scheduler.

    It serves them over HTTP, too. The trainer's baseline may advance as soon as `publish` returns,
    whichever replicas have fetched the version.
    """

    _server_class: type[VersionServer] = VersionServer

    def __init__(
        self,
        job: str,
        scheduler: str,
        root: Path,
        port: int,
        key: SigningKey,
        max_staleness: int = 1,
        settings: PublisherSettings = DEFAULTS,
    ) -> None:
        """Prepare a publisher for the scheduler at `scheduler`, HOST:PORT, several with commas.

        `max_staleness`: versions that a healthy replica may lag. Raise ConfigError if other
        machines can reach the server without certificates.
        """
        store = self._store = ChunkStore(root)
        self._root = root
        self._settings = settings
        self._held: RunRoot | None = None
        self._keeper: RunKeeper | None = None
        # Durable versions that are not announced yet, in their order.
        self._unannounced: list[tuple[int, int]] = []
        self._announcing = asyncio.Lock()
        self._begun: Begun | None = None
        leases = ReadLeases(time.monotonic())
        certificates, credentials = settings.certificates, settings.credentials
        if certificates is not None and credentials.ca is None:
            credentials = credentials.proving(certificates)
        credentials = replace(credentials, insecure=settings.insecure or credentials.insecure)
        self._job = job
        self._key = key
        self._registration = rose_pb2.RegisterJobRequest(
            job=job,
            max_staleness=max_staleness,
            model=settings.model,
            weight=settings.weight,
            max_guests=settings.max_guests,
            take_over=settings.take_over,
        )
        # Retention has a VersionPublisher of its own, since it runs beside the training.
        self._publisher, self._bases = (
            VersionPublisher(store, job, "rose-trainer", key, on_update=settings.on_update)
            for _ in range(2)
        )
        self._server = self._server_class(
            store,
            port,
            credentials=credentials,
            host=settings.host,
            leases=leases,
            signer=Signer(job, key),
        )
        self._bucket = None
        if settings.bucket:
            checked_bucket(settings.bucket, "bucket")
            self._bucket = BucketCopy(store, settings.bucket, job, key, self._check_run)
        self._retention = RetentionTask(store, self._bases, leases, _log.warning)
        self._scheduler = trainers_channel(scheduler, certificates)
        # A channel of its own: a renewal must not disturb an announcement.
        self._renewals = trainers_channel(scheduler, certificates)

    @property
    def url(self) -> str:
        """URL at which nodes read the versions: of this publisher's server, or of its bucket."""
        return self._bucket.url if self._bucket else self._server.url

    @property
    def adapter(self) -> Adapter | None:
        """Settings of the LoRA adapter that versions are, None for whole weights; a version that is
        gone on from brings its own. After a change publish anew.
        """
        return self._publisher.adapter

    @adapter.setter
    def adapter(self, adapter: Adapter | None) -> None:
        if adapter is not None and self._settings.on_update is OnUpdate.KEEP:
            raise RefusedError("on_update is keep: KV belongs to its adapter; choose another")
        self._publisher.adapter = self._bases.adapter = adapter

    @property
    def begun(self) -> Begun:
        """State that `start` returned. Raises RefusedError before `start`."""
        if self._begun is None:
            raise RefusedError("the publisher was not started; call start() first")
        return self._begun

    async def start(self) -> Begun:
        """Lock the root, serve it, register the job; return what may be continued.

        A version that is durable and was never announced, since its trainer was killed, is
        announced now. Raises RefusedError where a living trainer publishes from the same root, and
        RunHeldError where a run with another root has the job and stays alive; a dead one is waited
        for, some ten seconds at most. The run is renewed on this event loop: a loop that stands
        still for longer may lose the job to another trainer.
        """
        self._held = await asyncio.to_thread(RunRoot.take, self._root, self._settings.run)
        try:
            return await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> Begun:
        # Check before the scheduler learns of this trainer: another job's root must not be served.
        await asyncio.to_thread(self._check_root)
        await self._server.start()
        if self._bucket:
            await self._bucket.check()
        self._retention.start()
        self._registration.claim.CopyFrom(self._claim)
        reply = await until_free(self._register, WAIT_S)
        self._keeper = RunKeeper(self._renewals, self._job, self._claim)
        self._keeper.start(reply.run_ttl_s)
        if self._bucket:
            await self._bucket.start()
        self._retention.bucket = self._bucket
        begun = await asyncio.to_thread(self._found, reply)
        if begun.resumed is not None:
            self.adapter = (await asyncio.to_thread(self._manifest, begun.resumed)).adapter
            for version, parent in await asyncio.to_thread(self._news, begun.resumed, reply):
                await self._announce(version, parent)
        self._begun = begun
        return begun

    async def _register(self) -> rose_pb2.RegisterJobReply:
        return await self._call(
            lambda stub, left_s: stub.RegisterJob(self._registration, timeout=left_s),
            f"the scheduler did not register job {self._job}",
        )

    @property
    def _claim(self) -> rose_pb2.Claim:
        assert self._held is not None
        return self._held.claim

    def _found(self, reply: rose_pb2.RegisterJobReply) -> Begun:
        """Return what may be continued: compare the root's versions with those the scheduler knows.

        Manifests of versions that were never announced and cannot be restored are deleted, for the
        newest whole one before them.
        """
        assert self._held is not None
        latest, newest = int(reply.latest_version), newest_version(self._store)
        if not newest:  # A base of version 0 is the model.
            return Begun(latest, why_anew=f"{self._root} holds no version")
        used = max(latest, newest)
        if reply.dropped:
            return Begun(
                used, why_anew=f"an operator has dropped the job's versions up to {latest}"
            )
        if latest and reply.latest_run not in ("", self._held.claim.run):
            return Begun(used, why_anew=f"another run announced version {latest}")
        if newest < latest:
            return Begun(used, why_anew=f"the root ends at {newest}, the job is at {latest}")
        # Versions after the scheduler's latest were never announced: a damaged one is dropped for
        # the one before it.
        numbers = {*self._store.versions(), *self._store.bases()}
        why = ""
        for version in sorted((n for n in numbers if n and n >= latest), reverse=True):
            try:
                self._check_whole(version)
            except CatalogError:
                why = why or "the root has no base yet, and no checkpoint was named"
            except (WeightError, OSError) as error:
                why = why or f"version {version} cannot be gone on from: {error}"
            else:
                if version < newest:
                    _log.warning("%s: going on from version %d: %s", self._root, version, why)
                    self._store.drop_after(version)
                return Begun(max(latest, version), resumed=version)
        return Begun(used, why_anew=why)

    def _check_whole(self, version: int) -> None:
        """Raise WeightError when a version cannot be restored from the root.

        Damaged chunks, and the manifests that name them, are deleted on the way.
        """
        self._manifest(version).verify(self._key.verify_key)
        damaged: list[str] = []
        while True:
            try:
                plan = way_to(
                    self._store.catalog(), version, model=self._settings.checkpoint is not None
                )
            except CatalogError as error:
                if not damaged:
                    raise
                raise ChunkDigestError(f"chunk {damaged[0]} is damaged or missing") from error
            manifests = [self._store.get_manifest(step, base=base) for step, base in plan.steps]
            chunks = {chunk.id for manifest in manifests for chunk in manifest.chunks}
            damaged = [name for name in chunks if not self._store.sound(name)]
            if not damaged:
                return
            for name in damaged:
                self._store.drop(name)

    def _check_root(self) -> None:
        """Raise RefusedError if the root holds versions of another job."""
        newest = newest_version(self._store)
        if newest is None:
            return
        try:
            job = self._manifest(newest).job
        except (WeightError, OSError):
            return  # What is damaged is nobody's, and `_found` says so.
        if job != self._job:
            raise RefusedError(
                f"{self._root} holds versions of job {job}; give job {self._job} a root of its own"
            )

    def _news(self, resumed: int, reply: rose_pb2.RegisterJobReply) -> list[tuple[int, int]]:
        """Return (version, parent) of each version to announce to the scheduler, oldest first.

        The newest version is announced again even if the scheduler knows it, since this publisher
        may have another URL.
        """
        known = int(reply.latest_version)
        if resumed == known:
            # Take the announced parent: the delta may be deleted. An older scheduler has none.
            has_parent = bool(reply.run_ttl_s)
            parent = int(reply.latest_parent) if has_parent else self._manifest(resumed).parent
            return [(resumed, parent)]
        news: list[tuple[int, int]] = []
        version = resumed
        while version > known:
            parent = self._manifest(version).parent
            news.append((version, parent))
            # A scheduler that knows no version needs the newest alone: nodes find its parts in
            # the catalog. A base replaces all versions before it.
            if not known or parent == version:
                break
            version = parent
        return news[::-1]

    def _manifest(self, version: int) -> Manifest:
        """Return the manifest of a version's delta, or of its base if it has no delta.

        Raises ManifestError when it is damaged.
        """
        manifest = self._store.find_manifest(version) or self._store.find_manifest(
            version, base=True
        )
        if manifest is None:
            raise ManifestError(f"the manifest of version {version} is damaged")
        return manifest

    async def restore(self) -> Mapping[str, TensorBits]:
        """Return the weights of the version `begun.resumed` by tensor name, checked against its
        digests.

        Raises RefusedError if there is no such version, and WeightError for damaged parts;
        `publish_anew` then begins a chain without them.
        """
        resumed = self.begun.resumed
        if resumed is None:
            raise RefusedError(
                f"there is no version to go on from ({self.begun.why_anew}); publish version"
                f" {self.begun.latest + 1} anew"
            )
        return await asyncio.to_thread(self._restored, resumed)

    def _restored(self, version: int) -> Mapping[str, TensorBits]:
        try:
            return restore(self._store, version)
        except CatalogError:
            if self._settings.checkpoint is None:
                raise
        return restore(self._store, version, read_model_dir(self._settings.checkpoint))

    async def publish(
        self,
        version: int,
        parent: int,
        old: Mapping[str, TensorBits],
        new: Mapping[str, TensorBits],
    ) -> Receipt:
        """Publish the step from `old` (version `parent`) to `new` as `version`, announce it, return
        its costs.

        `new` may be read once more in the background, when a base is due: hand in weights that are
        not written to any more. Raises RefusedError for numbers that do not follow, RunFencedError
        once another trainer has the job, and NotAnnouncedError where the version is durable but no
        scheduler could be reached; continue from it, since the next call announces it too.
        """
        self._check_next(version, parent)
        started_s = time.perf_counter()
        async with self._retention.publishing:
            level = await asyncio.to_thread(
                level_for, self._settings.level, self._server.link_bytes_s, old, new
            )
            publish = partial(self._publisher.publish, level=level)
            manifest = await self._encoded(partial(publish, version, parent, old, new))
        self._retention.published(Latest(version, parent, new))
        await self._announce(version, parent)
        return self._receipt(manifest, new, level, started_s)

    async def publish_anew(self, version: int, tensors: Mapping[str, TensorBits]) -> Receipt:
        """Publish all weights as a version without a parent, which replaces the job's chain.

        Return its costs. Replicas of any version take it by an ordinary update. `version` must be
        greater than all that the job had, else RefusedError is raised. The scheduler drops the old
        chain at once; the root deletes it once no reader needs it. `tensors` are not read after the
        call returns.
        """
        self._check_unused(version)
        started_s = time.perf_counter()
        async with self._retention.publishing:
            base = partial(self._publisher.publish_base, version, tensors)
            manifest = await self._encoded(base)
        self._retention.published(Latest(version, version, tensors))
        await self._announce(version, version)
        return self._receipt(manifest, tensors, Level.FAST, started_s)

    async def _encoded(self, encode: Callable[[], Manifest]) -> Manifest:
        if self._bucket:
            return await self._bucket.during(encode)
        return await asyncio.to_thread(encode)

    def _check_run(self) -> None:
        if self._keeper is not None:
            self._keeper.check()

    def _check_unused(self, version: int) -> None:
        self._check_run()
        if version <= self.begun.latest:
            raise RefusedError(
                f"version {version} of {self._job} is used up; publish {self.begun.latest + 1} anew"
            )

    def _check_next(self, version: int, parent: int) -> None:
        """Raise RefusedError for a (version, parent) whose delta no replica could take."""
        begun = self.begun
        self._check_run()
        if version <= begun.latest:
            raise RefusedError(
                f"version {version} of {self._job} is used up, the job is at {begun.latest}; go on"
                f" from there (start().resumed, restore()) or publish {begun.latest + 1} anew"
            )
        here = (self._store.manifest_path(parent, base=base) for base in (False, True))
        # A version that was not checked, or is damaged, must not be built on.
        untrusted = parent == begun.latest != begun.resumed
        if parent < begun.latest or (
            parent and (untrusted or not any(path.is_file() for path in here))
        ):
            raise RefusedError(
                f"version {version} cannot follow {parent}: {begun.why_anew or 'it is not newest'};"
                f" publish it anew, as a base"
            )

    async def _announce(self, version: int, parent: int) -> None:
        self._unannounced.append((version, parent))
        await self.announce_late()

    async def announce_late(self) -> None:
        """Announce the versions that no scheduler knows yet, in their order; none is usual.

        Raises NotAnnouncedError while no scheduler can be reached.
        """
        async with self._announcing:
            while self._unannounced:
                await self._tell(*self._unannounced[0])
                del self._unannounced[0]

    async def _tell(self, version: int, parent: int) -> None:
        request = rose_pb2.AnnounceVersionRequest(
            job=self._job, version=version, parent=parent, url=self.url, claim=self._claim
        )
        if self._bucket:
            try:
                await self._bucket.publish()
            except (WeightError, OSError) as error:
                raise NotAnnouncedError(
                    f"version {version}: {error}; it is, with the next"
                ) from error
        trace = current_trace()
        metadata = tuple(trace.headers().items()) if trace else ()
        try:
            await self._call(
                lambda stub, left_s: stub.AnnounceVersion(
                    request, timeout=left_s, metadata=metadata
                ),
                f"version {version} is published but could not be announced",
            )
        except UnavailableError as error:
            raise NotAnnouncedError(f"{error}; it is, with the next one") from error

    async def _call(
        self, ask: "Callable[[SchedulerAsyncStub, float], Awaitable[R]]", failure: str
    ) -> R:
        """Call the scheduler and return its reply.

        Raises RunHeldError or RunFencedError as they are, and UnavailableError, which begins with
        `failure`, for the rest.
        """
        try:
            return await self._scheduler.call(ask, ANNOUNCE_TIMEOUT_S)
        except (grpc.aio.AioRpcError, UnavailableError) as error:
            typed = run_error(error)
            if isinstance(typed, RunFencedError) and self._keeper is not None:
                self._keeper.lost(typed)
            if typed is not None:
                raise typed from error
            raise UnavailableError(f"{failure}: {reason_of(error)}") from error

    @staticmethod
    def _receipt(
        manifest: Manifest, new: Mapping[str, TensorBits], level: Level, started_s: float
    ) -> Receipt:
        elements = sum(tensor.bits.size for tensor in new.values())
        return Receipt(
            version=manifest.version,
            wire_bytes=manifest.wire_bytes + manifest.size,
            full_bytes=sum(tensor.bits.nbytes for tensor in new.values()),
            density=manifest.changed / elements,
            publish_s=time.perf_counter() - started_s,
            level=level,
        )

    async def announce(self, version: int, parent: int) -> None:
        """Announce a version that ranks have put into the root by themselves.

        `parent`: `version` itself for a base that begins a chain anew. Files that no reader needs
        are deleted in the background; the ranks publish bases that are due (`base_due`). Raises
        RefusedError for a version that is not in the root, and like `publish`.
        """
        self._check_run()
        if not self._store.manifest_path(version, base=version == parent).is_file():
            raise RefusedError(f"version {version} is not in {self._root}; publish it there first")
        self._retention.published(Latest(version, parent, {}))
        await self._announce(version, parent)

    async def publish_base(self, version: int, tensors: Mapping[str, TensorBits]) -> None:
        """Publish all weights of a version as a base, without announcing it.

        Publish version 0, the job's model, so before the first version: then replicas that hold
        another job's weights come to it by an update instead of an engine restart.
        """
        async with self._retention.publishing:
            await self._encoded(partial(self._publisher.publish_base, version, tensors))

    @asynccontextmanager
    async def adding(self) -> AsyncIterator[None]:
        """Yield a context in which no file of the root is deleted, so that others can add
        chunks."""
        async with self._retention.publishing:
            yield

    async def base_due(self, full_bytes: int) -> bool:
        """Return True if a base of the newest version should be published for joining readers.

        `full_bytes`: bytes of all weights.
        """
        return await asyncio.to_thread(self._retention.base_due, full_bytes)

    async def end_job(self) -> None:
        """Ask the scheduler to end the job, which returns all of its leases, and end the run.

        Raises UnavailableError.
        """
        claim = self._claim if self._held is not None else None
        request = rose_pb2.EndJobRequest(job=self._job, claim=claim)
        await self._call(
            lambda stub, left_s: stub.EndJob(request, timeout=left_s),
            f"the scheduler did not end job {self._job}",
        )
        if self._keeper is not None:
            await self._keeper.close()

    async def settle(self) -> None:
        """Wait until bases that are due are published and files that no reader needs are
        deleted."""
        await self._retention.settle()

    async def close(self) -> None:
        """Stop serving and release the run and the root; published files stay."""
        if self._keeper is not None:
            await self._keeper.close()
        await self._retention.close()
        await self._server.close()
        await self._scheduler.close()
        await self._renewals.close()
        if self._held is not None:
            self._held.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
