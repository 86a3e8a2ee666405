"""Limits of a request: bounded bodies, headers of every generating route, and the limit log.

Bodies are bounded in size and in time, and never compressed. A field of the body overrides most
headers.
"""

import asyncio
from collections.abc import Mapping

from aiohttp import web

from rose.contract.gateway import EVENT_ID_HEADER, TIMEOUT_HEADER
from rose.gateway.errors import BadRequest, BodyEncoded, BodyTooLarge, BodyTooSlow
from rose.process.http_port import LimitLog

MAX_DIGITS = 15


def header_of(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header's text; None if it is not sent. Raises BadRequest for other bytes."""
    text = headers.get(name)
    # The server keeps undecodable bytes as surrogates, which no answer and no log can hold.
    if text is not None and not (text.isascii() or _is_text(text)):
        raise BadRequest(f"{name} is not UTF-8", name)
    return text


def timeout_of(headers: Mapping[str, str], body_s: float | None) -> float | None:
    """Return the caller's timeout: the body's field, else the header. Raises BadRequest."""
    text = header_of(headers, TIMEOUT_HEADER)
    if body_s is not None or text is None:
        return body_s
    try:
        return float(text)
    except ValueError as error:
        raise BadRequest(f"{TIMEOUT_HEADER} is a number of seconds, not {text[:40]!r}") from error


def resume_of(headers: Mapping[str, str], body_from: int | None) -> tuple[int, bool]:
    """Return the caller's received tokens, and True if it wants event ids. Raises BadRequest."""
    text = header_of(headers, EVENT_ID_HEADER)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise BadRequest(f"{EVENT_ID_HEADER} is a number of tokens, not {text[:40]!r}")
    start = body_from if body_from is not None else int(text or 0)
    if not 0 <= start < 10**MAX_DIGITS:
        raise BadRequest(
            f"resume_from is a number of tokens: at least 0, at most {MAX_DIGITS} digits",
            "resume_from",
        )
    return start, text is not None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
