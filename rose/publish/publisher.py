"""WeightPublisher: what a trainer calls after each update of its policy."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc.aio

from rose.errors import UnavailableError
from rose.publish.credentials import OPEN, Credentials
from rose.publish.leases import Leases
from rose.publish.server import Signer, VersionServer
from rose.publish.upkeep import Latest, Upkeep
from rose.rpc import rose_pb2, rose_pb2_grpc
from rose.rpc.channel import make_channel
from weight_transfer import ChunkStore, OnUpdate, Publisher, SigningKey, TensorBits

_log = logging.getLogger(__name__)

# A scheduler that restarts is waited for: training goes on meanwhile anywhere but here.
ANNOUNCE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a publication cost: bytes that cross a link once, and the share of elements changed."""

    version: int
    wire_bytes: int
    full_bytes: int
    density: float
    publish_s: float


class WeightPublisher:
    """Publishes the versions of one job: durable first, then announced.

    The trainer's baseline may advance as soon as `publish` returns, whoever has pulled it yet.
    """

    def __init__(
        self,
        job: str,
        scheduler: str,
        root: Path,
        port: int,
        key: SigningKey,
        max_staleness: int = 1,
        corrupt_every: int = 0,
        *,
        host: str = "127.0.0.1",
        credentials: Credentials = OPEN,
        on_update: OnUpdate = OnUpdate.RECOMPUTE,
        insecure: bool = False,
    ) -> None:
        """`host`: an address that all nodes reach. `credentials`: what they must show.

        `insecure`: other machines may reach it without certificates. ConfigError without.
        `on_update`: what becomes of turns in flight when a replica takes a version.
        """
        store = ChunkStore(root)
        leases = Leases(time.monotonic())
        self._job = job
        self._max_staleness = max_staleness
        self._publisher = Publisher(store, job, "rose-trainer", key, on_update=on_update)
        self._server = VersionServer(
            store,
            port,
            corrupt_every,
            credentials=credentials,
            host=host,
            leases=leases,
            signer=Signer(job, key),
            insecure=insecure,
        )
        bases = Publisher(store, job, "rose-trainer", key, on_update=on_update)
        self._upkeep = Upkeep(store, bases, leases, _log.warning)
        self._channel = make_channel(scheduler)
        self._scheduler = rose_pb2_grpc.SchedulerStub(self._channel)

    async def start(self) -> None:
        """Serve, and register the job with the scheduler."""
        await self._server.start()
        self._upkeep.start()
        request = rose_pb2.RegisterJobRequest(job=self._job, max_staleness=self._max_staleness)
        try:
            await self._scheduler.RegisterJob(
                request, timeout=ANNOUNCE_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(
                f"the scheduler did not register job {self._job}: {error.details()}"
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
        async with self._upkeep.publishing:
            manifest = await asyncio.to_thread(self._publisher.publish, version, parent, old, new)
        self._upkeep.published(Latest(version, parent, new))
        request = rose_pb2.AnnounceVersionRequest(
            job=self._job, version=version, parent=parent, url=self._server.url
        )
        try:
            await self._scheduler.AnnounceVersion(
                request, timeout=ANNOUNCE_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(
                f"version {version} is published but could not be announced: {error.details()}"
            ) from error
        elements = sum(tensor.bits.size for tensor in new.values())
        return Receipt(
            version=version,
            wire_bytes=manifest.wire_bytes + manifest.size,
            full_bytes=sum(tensor.bits.nbytes for tensor in new.values()),
            density=manifest.changed / elements,
            publish_s=time.perf_counter() - started_s,
        )

    async def settle(self) -> None:
        """Return once the bases that are due are made and what nobody needs is gone."""
        await self._upkeep.settle()

    async def close(self) -> None:
        """Stop serving; published files stay."""
        await self._upkeep.close()
        await self._server.close()
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
