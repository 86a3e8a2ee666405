"""Buckets that hold a job's versions: S3, Google Cloud Storage, Azure Blob or a shared folder.

    manifests/{version}, manifests/{version}.base, chunks/{blake3}, catalog    as `serve` has them
    leases/{version}/{reader}    empty; valid for LONGEST_TTL_S after the store's time of writing

A publisher copies its root there (`BucketCopy`), and nodes and relays read the bucket as they read
a publisher (`SourceSession`), so no port is open between the two clusters. Manifests and catalog
are signed and chunks are named by their digest, so the bucket is trusted no more than a neighbour.
The client, obstore, takes its credentials from the environment: AWS_*, GOOGLE_*, AZURE_*.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

from weight_transfer.errors import BucketError

AT_ONCE: Final = 16
"""Most requests to a bucket at once."""
SILENCE_S: Final = 30.0
UPLOAD_S: Final = 120.0
_CONNECT_S, _RETRY_S = 3.0, 10.0
_PART_BYTES = 1 << 18
T = TypeVar("T")


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

    async def read(self, path: str, most: int, silence_s: float = SILENCE_S) -> bytes:
        """Return a whole object of at most `most` bytes."""
        body = bytearray()
        async for part in self.get(path, 0, silence_s):
            body += part
            if len(body) > most:
                raise BucketError(f"{self.url}/{path} has more than {most} bytes")
        return bytes(body)

    async def put(self, path: str, body: bytes | Path, within_s: float = UPLOAD_S) -> None:
        """Write an object whole, or nothing of it; `body` may be a file.

        Raises FileNotFoundError if that file is gone.
        """
        import obstore

        with self._failures(f"take {path}"):
            async with asyncio.timeout(within_s):
                await obstore.put_async(self._store, path, body)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; those that are not there are ignored."""
        import obstore

        # A folder refuses all for one that is not there.
        at_once = 1 if self.url.startswith("file:") else max(1, len(paths))
        for at in range(0, len(paths), at_once):
            with self._failures("delete objects"), suppress(FileNotFoundError):
                async with asyncio.timeout(SILENCE_S):
                    await obstore.delete_async(self._store, paths[at : at + at_once])

    async def objects(self, folder: str) -> dict[str, float]:
        """Return when the store wrote each object below `folder`, in Unix seconds of the store's
        clock, by path.
        """
        import obstore

        found: dict[str, float] = {}
        with self._failures(f"list {folder}"):
            batches = aiter(obstore.list(self._store, folder))
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        batch = await anext(batches)
                except StopAsyncIteration:
                    return found
                found |= {each["path"]: each["last_modified"].timestamp() for each in batch}

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise
        except (BaseError, OSError, ValueError) as error:
            why = str(error).partition("\n")[0] or "it does not answer"
            raise BucketError(f"{self.url} does not {what}: {why:.300}") from error


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of calls in their order; an error of one ends all others first."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
