"""Copy of a publisher's root in a bucket (`weight_transfer.bucket`), from which nodes read.

during    chunks of a version while it is encoded
publish   chunks that the bucket lacks, then manifests, then the catalog: whatever is listed is
          whole, and what was interrupted goes on with the chunks that are left
leases    readers write theirs as objects; their age is by the store's own clock
prune     what the root has deleted is deleted in the bucket
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from weight_transfer.bucket import AT_ONCE, Bucket, together
from weight_transfer.catalog import LONGEST_TTL_S, Catalog, ReadLeases
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import BucketError, ReadLeaseError, WeightError
from weight_transfer.fetch.fetcher import path_of
from weight_transfer.fetch.publisher_client import (
    CATALOG,
    LEASES,
    MAX_CATALOG_BYTES,
    decode_catalog,
    encode_catalog,
)
from weight_transfer.format.manifest import Manifest
from weight_transfer.format.signing import SigningKey
from weight_transfer.publish.version_publisher import DEFAULT_LIFETIME_S

_CATALOG, _LEASES = CATALOG.lstrip("/"), LEASES.lstrip("/")
# The store's own clock, read from the time at which it wrote this object.
_CLOCK = f"{_LEASES}/now"
_LOOK_S = 0.1
"""Seconds between looks for chunks of a version that is being encoded."""


class BucketCopy:
    """Copy of a chunk store in a bucket. All methods raise BucketError and StoreError."""

    def __init__(
        self,
        store: ChunkStore,
        url: str,
        job: str,
        key: SigningKey,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a copy. check: raises for a trainer that has lost its job, before each write."""
        self.url = url
        self._check = check
        self._store = store
        self._job = job
        self._key = key
        self._bucket = Bucket(url)
        # Time of writing of the root's file, by the path of its copy.
        self._copied: dict[str, int] = {}
        self._changing = asyncio.Lock()

    async def check(self) -> None:
        """Check that the bucket can be read and is this job's."""
        try:
            raw = await self._bucket.read(_CATALOG, MAX_CATALOG_BYTES)
        except FileNotFoundError:
            raw = b""
        if raw:
            try:
                decode_catalog(raw, self._job, self._key.verify_key, 0.0)
            except WeightError as error:
                raise BucketError(
                    f"{self.url} has a catalog of another job or key ({error!s:.120}); give job"
                    f" {self._job} a folder of its own"
                ) from error

    async def start(self) -> None:
        """List what the bucket has, once no other trainer of the job deletes any of it."""
        for folder in ("chunks", "manifests"):
            self._copied |= dict.fromkeys(await self._bucket.objects(folder), 0)

    async def during(self, encode: Callable[[], Manifest]) -> Manifest:
        """Encode a version in a thread and return its manifest; copy its chunks meanwhile.

        An error of the bucket ends the copying alone: `publish` raises it anew.
        """
        encoding = asyncio.ensure_future(asyncio.to_thread(encode))
        with contextlib.suppress(WeightError, OSError):
            while not encoding.done():
                async with self._changing:
                    began_s = time.monotonic()
                    files = await asyncio.to_thread(self._files)
                    look_s = time.monotonic() - began_s
                    await self._put_chunks(files)
                # Looks at a large root take a tenth of the time at most.
                await asyncio.wait([encoding], timeout=max(_LOOK_S, 9 * look_s))
        return await encoding

    async def publish(self) -> None:
        """Copy what the bucket lacks of the root, then the catalog."""
        self._check()
        async with self._changing:
            files = await asyncio.to_thread(self._files)
            if not files:  # Another root's versions stay listed until this one has some.
                return
            await self._put_chunks(files)
            self._check()  # Another trainer may have taken the job meanwhile.
            # A chunk never changes; a manifest is signed anew.
            signed = {
                path: file
                for path, file in files.items()
                if path.startswith("manifests/") and self._copied.get(path) != file[1]
            }
            await self._put(signed)
            await self._list()

    async def lease_to(self, leases: ReadLeases) -> None:
        """Take the leases that readers wrote into the bucket, and delete the expired ones."""
        await self._bucket.put(_CLOCK, b"")
        written = await self._bucket.objects(_LEASES)
        store_now_s, now_s, expired = written.pop(_CLOCK), time.monotonic(), []
        # A reader's newest lease counts.
        for path, written_s in sorted(written.items(), key=itemgetter(1)):
            left_s = written_s + LONGEST_TTL_S - store_now_s
            if left_s <= 0:
                expired.append(path)
                continue
            with contextlib.suppress(ValueError, ReadLeaseError):
                _, version, reader = path.split("/")
                leases.take(reader, int(version), left_s, now_s, reader)
        await self._bucket.delete(expired)

    async def prune(self) -> None:
        """Delete the copies of files that the root has deleted."""
        self._check()
        async with self._changing:
            files = await asyncio.to_thread(self._files)
            gone = [path for path in self._copied if path not in files]
            if gone:
                await self._list()
                await self._bucket.delete(gone)
                for path in gone:
                    del self._copied[path]

    async def _put_chunks(self, files: dict[str, tuple[Path, int]]) -> None:
        new = files.keys() - self._copied.keys()
        await self._put({path: files[path] for path in new if path.startswith("chunks/")})

    async def _put(self, files: dict[str, tuple[Path, int]]) -> None:
        pending = iter(files.items())

        async def some() -> None:
            for path, (file, written_ns) in pending:
                with contextlib.suppress(FileNotFoundError):  # It was deleted meanwhile.
                    await self._bucket.put(path, file)
                    self._copied[path] = written_ns

        await together(some() for _ in range(AT_ONCE))

    async def _list(self) -> None:
        """Write the catalog of what the bucket has; the root may have more meanwhile."""
        root, copied = await asyncio.to_thread(self._store.catalog), self._copied
        bases = {v: size for v, size in root.bases.items() if path_of(v, base=True) in copied}
        deltas = (each for each in root.deltas if path_of(each.version, base=False) in copied)
        catalog = Catalog(bases, tuple(deltas))
        self._check()
        # Readers use the catalog while the trainer is stopped, as long as manifests are valid.
        raw = encode_catalog(catalog, self._job, self._key, time.time(), DEFAULT_LIFETIME_S)
        await self._bucket.put(_CATALOG, raw)

    def _files(self) -> dict[str, tuple[Path, int]]:
        """Return each file of the root with the time at which it was written, by path of its
        copy."""
        store, files = self._store, {}
        for base, versions in ((False, store.versions()), (True, store.bases())):
            for version in versions:
                path = store.manifest_path(version, base=base)
                files[path.name] = path_of(version, base=base)
        return {
            files.get(each.name, f"chunks/{each.name}"): (each.path, each.written_ns)
            for each in store.files()
            if each.name in files or each.path.parent == store.chunks_dir
        }
