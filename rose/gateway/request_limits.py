"""Limits of a request's body: bounded in size and in time, and never compressed."""

import asyncio

from aiohttp import web

from rose.gateway.errors import BadRequest, BodyEncoded, BodyTooLarge, BodyTooSlow
from rose.process.http_port import LimitLog

# A slower sender has `body_timeout_s` in all, however long its body is.
LEAST_BYTES_S = 16 << 10


class Bodies:
    """Reader of bodies of at most `max_bytes`, which begin to come within `timeout_s`."""

    def __init__(self, max_bytes: int, timeout_s: float, limits: LimitLog) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._limits = limits

    async def read(self, http: web.Request) -> bytes:
        """Return the whole body. Raises TurnError for one beyond the limits."""
        coding = http.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise BodyEncoded("Content-Encoding is not supported: send the body as it is")
        self._check(http.content_length or 0)
        try:
            if http.content.is_eof():
                body = await http.read()
                self._check(len(body))
                return body
            return await self._awaited(http)
        except web.RequestPayloadError as error:
            raise BadRequest(
                f"the body is no HTTP: {' '.join(str(error).split())[:200]}"
            ) from error

    async def _awaited(self, http: web.Request) -> bytes:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        parts: list[bytes] = []
        size = 0
        while True:
            limit_s = began_s + self._timeout_s + size / LEAST_BYTES_S
            try:
                async with asyncio.timeout_at(limit_s):
                    part = await http.content.readany()
            except TimeoutError as error:
                self._limits.bites("body_timeout_s")
                raise BodyTooSlow(
                    f"of the body {size} bytes came in {clock() - began_s:.0f} s; send it faster"
                ) from error
            if not part:
                return b"".join(parts)
            size += len(part)
            self._check(size)
            parts.append(part)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise BodyTooLarge(
                f"the body is longer than {self._max_bytes} bytes; send a smaller one"
            )
