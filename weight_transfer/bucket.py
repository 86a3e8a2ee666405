"""Buckets that hold a job's versions: S3, Google Cloud Storage, Azure Blob or a shared folder.

    manifests/{version}, manifests/{version}.base, chunks/{blake3}, catalog    as `serve` has them
    leases/{version}/{reader}    empty; valid for LONGEST_TTL_S after the store's time of writing

A publisher copies its root there (`BucketCopy`), and nodes and relays read the bucket as they read
a publisher (`SourceSession`), so no port is open between the two clusters. Manifests and catalog
are signed and chunks are named by their digest, so the bucket is trusted no more than a neighbour.
The client, obstore, takes its credentials from the environment: AWS_*, GOOGLE_*, AZURE_*.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from weight_transfer.errors import BucketError

AT_ONCE: Final = 16
"""Most requests to a bucket at once."""
SILENCE_S: Final = 30.0
_CONNECT_S, _RETRY_S = 3.0, 10.0
_PART_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a bucket: its path below the bucket's URL, and when the store wrote it, in Unix
    seconds of the store's clock.
    """

    path: str
    written_s: float


class Bucket:
    """Client of one bucket, or of a folder of it.

    All methods raise BucketError, `get` FileNotFoundError for an object that is not there.
    """

    def __init__(self, url: str) -> None:
        """Open `url`: s3://BUCKET/PATH, gs://, az:// or file:///PATH. Sends no request yet."""
        try:
            from obstore.store import LocalStore, ObjectStore, from_url
        except ImportError as error:
            raise BucketError(f"{url} needs obstore; install rose-rollout[bucket]") from error
        self.url = url
        self._store: ObjectStore
        with self._failures("be opened"):
            if url.startswith("file://"):
                self._store = LocalStore(url.removeprefix("file://"), mkdir=True)
            else:
                self._store = from_url(
                    url,
                    # Silence ends a request, not its length: chunks cross slow links.
                    client_options={
                        # The environment names an endpoint with its scheme.
                        "allow_http": True,
                        "connect_timeout": timedelta(seconds=_CONNECT_S),
                        "timeout": timedelta(days=1),
                    },
                    retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=_RETRY_S)},
                )

    async def get(
        self, path: str, start: int = 0, silence_s: float = SILENCE_S
    ) -> AsyncGenerator[bytes]:
        """Yield the bytes of an object from `start` on; `silence_s` is the longest wait for a
        part.
        """
        import obstore

        with self._failures(f"give {path}"):
            async with asyncio.timeout(silence_s):
                options: obstore.GetOptions = {"range": {"offset": start}} if start else {}
                result = await obstore.get_async(self._store, path, options=options)
            parts = aiter(result.stream(min_chunk_size=_PART_BYTES))
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        part = await anext(parts)
                except StopAsyncIteration:
                    return
                yield bytes(part)

    async def read(self, path: str, most: int) -> bytes:
        """Return a whole object of at most `most` bytes."""
        body = bytearray()
        async for part in self.get(path):
            body += part
            if len(body) > most:
                raise BucketError(f"{self.url}/{path} has more than {most} bytes")
        return bytes(body)

    async def put(self, path: str, body: bytes | Path) -> None:
        """Write an object whole, or nothing of it; `body` may be a file."""
        import obstore

        with self._failures(f"take {path}"):
            await obstore.put_async(self._store, path, body)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; those that are not there are ignored."""
        import obstore

        with self._failures("delete objects"):
            if paths:
                await obstore.delete_async(self._store, paths)

    async def objects(self, folder: str) -> list[StoredObject]:
        """Return all objects below `folder`."""
        import obstore

        found = []
        with self._failures(f"list {folder}"):
            async for batch in obstore.list(self._store, folder):
                found += [StoredObject(o["path"], o["last_modified"].timestamp()) for o in batch]
        return found

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise
        except (BaseError, OSError, ValueError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise BucketError(f"{self.url} does not {what}: {why:.300}") from error


def lease_path(folder: str, reader: str, version: int) -> str:
    """Return the path of a reader's lease in the folder `folder`, which is "leases" or ends so."""
    name = hashlib.blake2b(reader.encode(), digest_size=16).hexdigest()
    return f"{folder}/{version}/{name}"
