"""Weight publisher: called by a trainer after each update of its policy.

A version is durable first, then announced. `RetentionTask` works behind the training: it makes base
snapshots, collects garbage, and renews signatures.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import grpc.aio

from rose.contract.weights import LONGEST_TTL_S
from rose.errors import RefusedError, UnavailableError
from rose.process.background_tasks import described
from rose.rpc import rose_pb2
from rose.rpc.leader_channel import LeaderChannel
from rose.security.certificates import CertificateFiles
from rose.security.roles import Role
from rose.weight_distribution.credentials import OPEN, Credentials
from rose.weight_distribution.level import AUTO, LevelChoice, level_for
from rose.weight_distribution.version_server import ReadLeases, Signer, VersionServer
from weight_transfer import ChunkStore, OnUpdate, Publisher, SigningKey, TensorBits, WeightError
from weight_transfer.format.delta_codec import Level
from weight_transfer.store.catalog import Catalog

# Signatures live for a day and are renewed from half of that on.
RENEW_EVERY_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Latest:
    """A version that was published, with all of its weights, which do not change any more."""

    version: int
    parent: int
    tensors: Mapping[str, TensorBits]


class RetentionTask:
    """Retention after each version: makes a base where one is due, then collects unneeded files.

    publisher: one of its own, since it works beside the training. It keeps the newest weights for
    as long as it works on them.
    """

    def __init__(
        self,
        store: ChunkStore,
        publisher: Publisher,
        leases: ReadLeases,
        on_trouble: Callable[[str], None],
    ) -> None:
        self.publishing = asyncio.Lock()
        """Held while chunks are put whose manifest is not written yet: none is collected then."""
        self._store = store
        self._publisher = publisher
        self._leases = leases
        self._on_trouble = on_trouble
        self._latest: Latest | None = None
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on the newest version is signed anew before it expires, however old it gets."""
        self._renewing = asyncio.create_task(self._renew())

    async def renew(self) -> None:
        """Sign the newest version anew where that is due."""
        async with self.publishing:
            try:
                await asyncio.to_thread(self._publisher.renew)
            except (WeightError, OSError) as error:
                self._on_trouble(f"the newest version was not signed anew: {error}")

    async def _renew(self) -> None:
        while True:
            await self.renew()
            await asyncio.sleep(RENEW_EVERY_S)

    def published(self, latest: Latest) -> None:
        """A version was published: it is announced next. Returns at once."""
        # Whoever hears of it has that long to take a lease of its own.
        self._hold(f"announced {latest.version}", latest.parent)
        self._latest = latest
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def settle(self) -> None:
        """Return once nothing is left to do."""
        if self._task:
            await self._task

    async def close(self) -> None:
        """Stop; a base that is half made is made again after the next version."""
        tasks = [task for task in (self._task, self._renewing) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while self._latest:
            latest, self._latest = self._latest, None
            try:
                if await asyncio.to_thread(self._base_due, latest):
                    make = partial(self._publisher.publish_base, latest.version, latest.tensors)
                    await asyncio.to_thread(make)
                await self._collect()
            except (WeightError, OSError) as error:
                self._on_trouble(f"retention after version {latest.version}: {error}")
            except Exception as error:  # noqa: BLE001 - it is told, and the next version is kept up
                self._on_trouble(f"retention after version {latest.version}: {described(error)}")

    def _base_due(self, latest: Latest) -> bool:
        found = self._store.catalog()
        size = sum(tensor.bits.nbytes for tensor in latest.tensors.values())
        # What the chain begins with is the model that every engine starts from: a base too.
        parents = {delta.parent for delta in found.deltas}
        roots = parents - {delta.version for delta in found.deltas} - found.bases.keys()
        return Catalog({**dict.fromkeys(roots, size), **found.bases}, found.deltas).base_due()

    async def _collect(self) -> None:
        now_s = time.monotonic()
        if self._leases.settled(now_s):
            async with self.publishing:
                leases = self._leases.live(now_s)
                await asyncio.to_thread(self._store.collect, leases, now_s)

    def _hold(self, name: str, version: int) -> None:
        try:
            self._leases.take(name, version, LONGEST_TTL_S, time.monotonic())
        except RefusedError as error:
            self._on_trouble(str(error))


_log = logging.getLogger(__name__)

# A scheduler that restarts is waited for: training goes on meanwhile anywhere but here.
ANNOUNCE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Receipt:
    """Cost of a publication: bytes that cross a link once, and the share of elements changed.

    `level`: how it was encoded.
    """

    version: int
    wire_bytes: int
    full_bytes: int
    density: float
    publish_s: float
    level: Level = Level.FAST


def trainers_channel(scheduler: str, certificates: CertificateFiles | None) -> LeaderChannel:
    """Make a trainer's way to the scheduler. ConfigError for a certificate of another role."""
    if certificates is not None:
        certificates.insist(Role.TRAINER)
    return LeaderChannel(scheduler, "the publisher's scheduler", certificates)


def _details(error: grpc.aio.AioRpcError | UnavailableError) -> str:
    return str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)


class WeightPublisher:
    """Publishes the versions of one job: durable first, then announced.

    The trainer's baseline may advance as soon as `publish` returns, whoever has pulled it yet.
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
        *,
        host: str = "127.0.0.1",
        credentials: Credentials = OPEN,
        on_update: OnUpdate = OnUpdate.RECOMPUTE,
        insecure: bool = False,
        level: LevelChoice = AUTO,
        certificates: CertificateFiles | None = None,
        model: str = "",
        weight: float = 1.0,
        max_guests: int = 0,
    ) -> None:
        """`scheduler`: HOST:PORT, several with commas. `host`: an address that all nodes reach.

        `credentials`: what they must show.

        `certificates`: the trainer's own, of its job; used towards the scheduler, and towards nodes
        where `credentials` name none.

        `insecure`: other machines may reach it without certificates. ConfigError without.
        `on_update`: what becomes of turns in flight when a replica takes a version.
        `level`: `fast`, `compact` (fewer bytes, more work), or by the speed that readers show.
        `model`: version 0, by the name that nodes know it by; empty: what replicas start with.
        `weight`, `max_guests`: the job's share beside other jobs', and its quota (0 for none).
        """
        store = ChunkStore(root)
        leases = ReadLeases(time.monotonic())
        if certificates is not None and credentials.ca is None:
            credentials = credentials.proving(certificates)
        self._level = level
        self._job = job
        self._registration = rose_pb2.RegisterJobRequest(
            job=job, max_staleness=max_staleness, model=model, weight=weight, max_guests=max_guests
        )
        self._publisher = Publisher(store, job, "rose-trainer", key, on_update=on_update)
        self._server = self._server_class(
            store,
            port,
            credentials=credentials,
            host=host,
            leases=leases,
            signer=Signer(job, key),
            insecure=insecure,
        )
        bases = Publisher(store, job, "rose-trainer", key, on_update=on_update)
        self._retention = RetentionTask(store, bases, leases, _log.warning)
        self._scheduler = trainers_channel(scheduler, certificates)

    @property
    def url(self) -> str:
        """Address from which versions are fetched."""
        return self._server.url

    async def start(self) -> None:
        """Serve, and register the job with the scheduler."""
        await self._server.start()
        self._retention.start()
        try:
            await self._scheduler.call(
                lambda stub, left_s: stub.RegisterJob(self._registration, timeout=left_s),
                ANNOUNCE_TIMEOUT_S,
            )
        except (grpc.aio.AioRpcError, UnavailableError) as error:
            raise UnavailableError(
                f"the scheduler did not register job {self._job}: {_details(error)}"
            ) from error

    async def publish(
        self,
        version: int,
        parent: int,
        old: Mapping[str, TensorBits],
        new: Mapping[str, TensorBits],
    ) -> Receipt:
        """Publish the step from `old` (version `parent`) to `new` and announce it.

        `new` is read once more behind the caller's back, where a base is due: hand in weights that
        are not written to any more.
        """
        started_s = time.perf_counter()
        async with self._retention.publishing:
            level = await asyncio.to_thread(
                level_for, self._level, self._server.link_bytes_s, old, new
            )
            publish = partial(self._publisher.publish, level=level)
            manifest = await asyncio.to_thread(publish, version, parent, old, new)
        self._retention.published(Latest(version, parent, new))
        request = rose_pb2.AnnounceVersionRequest(
            job=self._job, version=version, parent=parent, url=self._server.url
        )
        try:
            await self._scheduler.call(
                lambda stub, left_s: stub.AnnounceVersion(request, timeout=left_s),
                ANNOUNCE_TIMEOUT_S,
            )
        except (grpc.aio.AioRpcError, UnavailableError) as error:
            raise UnavailableError(
                f"version {version} is published but could not be announced: {_details(error)}"
            ) from error
        elements = sum(tensor.bits.size for tensor in new.values())
        return Receipt(
            version=version,
            wire_bytes=manifest.wire_bytes + manifest.size,
            full_bytes=sum(tensor.bits.nbytes for tensor in new.values()),
            density=manifest.changed / elements,
            publish_s=time.perf_counter() - started_s,
            level=level,
        )

    async def publish_base(self, version: int, tensors: Mapping[str, TensorBits]) -> None:
        """Publish a version as a whole, so that replicas of other jobs come to it by an update.

        Of version 0, the job's model, before its first version: without any base a replica that
        held another job's weights starts its engine anew. Nothing is announced.
        """
        async with self._retention.publishing:
            await asyncio.to_thread(self._publisher.publish_base, version, tensors)

    async def end_job(self) -> None:
        """Give back all that the job has leased, when no more rollouts are wanted."""
        request = rose_pb2.EndJobRequest(job=self._job)
        try:
            await self._scheduler.call(
                lambda stub, left_s: stub.EndJob(request, timeout=left_s), ANNOUNCE_TIMEOUT_S
            )
        except (grpc.aio.AioRpcError, UnavailableError) as error:
            raise UnavailableError(
                f"the scheduler did not end job {self._job}: {_details(error)}"
            ) from error

    async def settle(self) -> None:
        """Return once the bases that are due are made and what nobody needs is gone."""
        await self._retention.settle()

    async def close(self) -> None:
        """Stop serving; published files stay."""
        await self._retention.close()
        await self._server.close()
        await self._scheduler.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
