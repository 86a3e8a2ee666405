"""Retention task of a publisher: publishes bases, deletes unneeded files, renews signatures.

It works beside the training, and never holds a version up.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from rose.errors import RoseError
from rose.process.background_tasks import described
from weight_transfer import ChunkStore, TensorBits, VersionPublisher, WeightError
from weight_transfer.catalog import LONGEST_TTL_S, Catalog, ReadLeases
from weight_transfer.errors import ReadLeaseError
from weight_transfer.publish.bucket_copy import BucketCopy

# Signatures live for a day, and are renewed after half of it.
RENEW_EVERY_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Latest:
    """A published version with all of its weights, which must not change any more.

    tensors: empty where a trainer's ranks have published the version and make the bases themselves.
    """

    version: int
    parent: int
    tensors: Mapping[str, TensorBits]


class RetentionTask:
    """Background task of a publisher: publishes bases, deletes unneeded files, renews signatures.

    publisher: one that no other task uses. The task holds the newest weights until its work on them
    ends.
    """

    def __init__(
        self,
        store: ChunkStore,
        publisher: VersionPublisher,
        leases: ReadLeases,
        on_trouble: Callable[[str], None],
    ) -> None:
        self.publishing = asyncio.Lock()
        """Lock held while chunks are stored before their manifest: no file is deleted meanwhile."""
        self._store = store
        self._publisher = publisher
        self._leases = leases
        self._on_trouble = on_trouble
        self.bucket: BucketCopy | None = None
        """Copy of the store that is kept up too, set once the job is this trainer's."""
        self._latest: Latest | None = None
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to check once an hour, until `close`, if the newest version must be signed again.

        It is signed again once half of its lifetime is over.
        """
        self._renewing = asyncio.create_task(self._renew())

    async def renew(self) -> None:
        """Sign the newest delta and base again if less than half of their lifetime remains.

        Log failures.
        """
        async with self.publishing:
            try:
                await asyncio.to_thread(self._publisher.renew)
                if self.bucket:
                    await self.bucket.publish()
            except (RoseError, WeightError, OSError) as error:
                self._on_trouble(f"the newest version was not signed anew: {error}")

    async def _renew(self) -> None:
        while True:
            await self.renew()
            await asyncio.sleep(RENEW_EVERY_S)

    def published(self, latest: Latest) -> None:
        """Record a new version, lease its parent and start the background work. Returns at once.

        Call it before the version is announced: a node that learns of it then has LONGEST_TTL_S to
        take a lease of its own.
        """
        # A node that is told of the version has LONGEST_TTL_S to take a lease of its own.
        self._hold(f"announced {latest.version}", latest.parent)
        self._latest = latest
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def settle(self) -> None:
        """Wait until the background work on published versions has ended."""
        if self._task:
            await self._task

    async def close(self) -> None:
        """Cancel all work; a base that is half published is published after the next version."""
        tasks = [task for task in (self._task, self._renewing) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while self._latest:
            latest, self._latest = self._latest, None
            try:
                size = sum(tensor.bits.nbytes for tensor in latest.tensors.values())
                if size > 0 and await asyncio.to_thread(self.base_due, size):
                    make = partial(self._publisher.publish_base, latest.version, latest.tensors)
                    await asyncio.to_thread(make)
                    if self.bucket:
                        await self.bucket.publish()
                await self._collect()
            except (WeightError, OSError) as error:
                self._on_trouble(f"retention after version {latest.version}: {error}")
            except Exception as error:  # noqa: BLE001 - it is told, and the next version is kept up
                self._on_trouble(f"retention after version {latest.version}: {described(error)}")

    def base_due(self, size: int) -> bool:
        """Return True if a base of the newest version should be published.

        `size`: bytes of all weights. Version 0 counts as a base of that size.
        """
        catalog = self._store.catalog()
        # Version 0 is the model that every engine starts from, so it counts as a base. If a chain
        # begins with any other version, its base is missing.
        return Catalog({0: size, **catalog.bases}, catalog.deltas).base_due()

    async def _collect(self) -> None:
        now_s = time.monotonic()
        if self._leases.settled(now_s):
            if self.bucket:
                await self.bucket.lease_to(self._leases)
            async with self.publishing:
                leases = self._leases.live(now_s)
                await asyncio.to_thread(self._store.collect, leases, now_s)
            if self.bucket:
                await self.bucket.prune()

    def _hold(self, name: str, version: int) -> None:
        try:
            self._leases.take(name, version, LONGEST_TTL_S, time.monotonic())
        except ReadLeaseError as error:
            self._on_trouble(str(error))
