"""Session of a reader of weights: HTTP servers, and the buckets that this machine names itself."""

import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Self

import aiohttp
import msgspec

from weight_transfer.bucket import AT_ONCE, SILENCE_S, Bucket, together
from weight_transfer.errors import BucketError
from weight_transfer.fetch.download import Reply
from weight_transfer.fetch.fetcher import SMALL_BYTES
from weight_transfer.fetch.publisher_client import LEASES, LeaseBody


class SourceSession:
    """Session that reads from HTTP servers by `http`, and from buckets.

    An announced URL of a bucket that was not named here is refused: who announces a version must
    not choose what this machine's credentials open.
    """

    def __init__(self, http: aiohttp.ClientSession, buckets: Sequence[Bucket] = ()) -> None:
        """Prepare a session; `http` is closed with it."""
        self._http = http
        self._buckets = buckets

    def request(
        self,
        method: str,
        url: str,
        *,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        allow_redirects: bool = True,
    ) -> AbstractAsyncContextManager[Reply]:
        """Return the context of a request, with the reply that the routes of `serve` give.

        Raises OSError when the bucket fails or is not one of this machine's.
        """
        if url.startswith("http"):
            return self._http.request(
                method,
                url,
                timeout=timeout,
                headers=headers,
                data=data,
                allow_redirects=allow_redirects,
            )
        return self._asked(method, url, timeout, headers or {}, data or b"")

    async def close(self) -> None:
        await self._http.close()

    @asynccontextmanager
    async def _asked(
        self,
        method: str,
        url: str,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str],
        data: bytes,
    ) -> AsyncIterator[Reply]:
        url, silence_s = url.partition("?")[0], timeout.sock_read or timeout.total or SILENCE_S
        bucket = next((b for b in self._buckets if url.startswith(f"{b.url}/")), None)
        if bucket is None:
            raise OSError(f"{url} is in no bucket of this machine; name it in `transport.buckets`")
        try:
            reply = await _reply(bucket, method, url, headers, data, silence_s)
        except FileNotFoundError:
            reply = _Object(404)
        except BucketError as error:
            raise OSError(str(error)) from error
        try:
            yield reply
        except BucketError as error:
            raise OSError(str(error)) from error
        finally:
            if reply.rest is not None:
                await reply.rest.aclose()


@dataclass(frozen=True, slots=True)
class _Object:
    """Reply with an object of a bucket."""

    status: int
    first: bytes = b""
    rest: AsyncGenerator[bytes] | None = None

    @classmethod
    async def begun(cls, parts: AsyncGenerator[bytes], start: int = 0) -> Self:
        """Return the reply once the first part is there."""
        return cls(206 if start else 200, await anext(parts, b""), parts)

    @property
    def content(self) -> Self:
        return self

    async def iter_any(self) -> AsyncGenerator[bytes]:
        yield self.first
        if self.rest is not None:
            async for part in self.rest:
                yield part


async def _reply(
    bucket: Bucket,
    method: str,
    url: str,
    headers: Mapping[str, str],
    data: bytes,
    silence_s: float,
) -> _Object:
    path = url[len(bucket.url) + 1 :]
    if method == "GET":
        start = int(headers.get("Range", "bytes=0-").strip("bytes=-"))
        if start:  # Not every store has ranges as S3 has them: then the object comes whole.
            with contextlib.suppress(BucketError):
                return await _Object.begun(bucket.get(path, start, silence_s), start)
        return await _Object.begun(bucket.get(path, 0, silence_s))
    if f"/{path}".endswith(LEASES):
        lease = msgspec.json.decode(data, type=LeaseBody)
        name = hashlib.blake2b(lease.reader.encode(), digest_size=16).hexdigest()
        await bucket.put(f"{path}/{lease.version}/{name}", b"", silence_s)
        return _Object(200)
    if f"/{path}".endswith("/chunks"):
        paths = [f"{path}/{name}" for name in msgspec.json.decode(data, type=list[str])]
        return await _Object.begun(_together(bucket, paths, silence_s))
    return _Object(404)  # A bucket does not check its own copies.


async def _together(
    bucket: Bucket, paths: Sequence[str], silence_s: float
) -> AsyncGenerator[bytes]:
    """Yield small objects one after the other, of which AT_ONCE are read at a time."""
    for at in range(0, len(paths), AT_ONCE):
        some = paths[at : at + AT_ONCE]
        for body in await together(bucket.read(path, SMALL_BYTES, silence_s) for path in some):
            yield body
