"""Rules of every HTTP request of gateway and front: a bounded body, and one shape of failures.

Bodies are bounded in size and in time, and never compressed.
"""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.gateway.apis.wire import encode
from rose.gateway.errors import (
    BadRequest,
    BodyEncoded,
    BodyTooLarge,
    BodyTooSlow,
    NoReplica,
    TurnError,
    Unauthorized,
)
from rose.process.http_port import LimitLog

JSON = "application/json"
CONTINUE = "100-continue"
Route = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def answered(
    http: web.BaseRequest,
    routed: Route,
    admit: Callable[[web.BaseRequest], None],
    refusal: Callable[[TurnError], web.Response],
    fault: Callable[[web.BaseRequest, Exception], TurnError],
) -> web.StreamResponse:
    """Return the route's response, or the error response that `refusal` makes of any failure.

    admit: raises TurnError for a caller that may not ask. fault: reports an unexpected exception
    and returns the error to answer. Some failures are raised before a middleware would be called.
    """
    try:
        if http.headers.get("Expect", CONTINUE).lower() != CONTINUE:
            raise web.HTTPExpectationFailed  # noqa: TRY301 - as aiohttp would for text
        admit(http)
        return await routed(http)
    except TurnError as error:
        return refusal(error)
    except UnavailableError as error:
        return refusal(NoReplica(str(error)))
    except (RefusedError, ConfigError) as error:
        return refusal(BadRequest(str(error)))
    except web.HTTPException as error:
        failed = TurnError(f"{http.method} {http.path}: {error.reason}")
        failed.status, failed.kind = error.status, error.reason
        return refusal(failed)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - a fault of this program ends one request only
        return refusal(fault(http, error))


def refusal_headers(error: TurnError) -> dict[str, str]:
    """Return the headers Retry-After and WWW-Authenticate as the error needs them."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
    if error.status == Unauthorized.status:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def json_answer(answer: object, status: int = 200) -> web.Response:
    """Return an HTTP response whose body is this object as JSON, with this status."""
    return web.Response(status=status, body=encode(answer), content_type=JSON)


# Bytes a second that extend the time limit; a slower sender has `body_timeout_s` in all.
LEAST_BYTES_S = 16 << 10


class Bodies:
    """Reader of request bodies of at most `max_bytes`; the time limit is `timeout_s` seconds and
    more for each byte received.
    """

    def __init__(self, max_bytes: int, timeout_s: float, limits: LimitLog) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._limits = limits

    async def read(self, http: web.Request) -> bytes:
        """Return the whole body. Raises BodyEncoded, BodyTooLarge, BodyTooSlow or BadRequest."""
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
