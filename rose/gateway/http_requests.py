"""Rules of every HTTP request of gateway and front: its caller, a bounded body, and one shape of
failures.

A caller is authenticated by certificate or token, which bound the names and jobs of its requests:

open routes                     ──► anybody
neither certificates nor tokens ──► ANYBODY (loopback, or a network that the operator fenced)
a token     ──► its job and subject; a trainer's certificate beside it must be of the same job
a certificate alone ──► trainer: its job; operator: any job; other roles: 403
nothing     ──► 401

Bodies are bounded in size and in time, and never compressed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from aiohttp import web

from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.gateway.apis.wire import encode
from rose.gateway.errors import (
    BadRequest,
    BodyEncoded,
    BodyTooLarge,
    BodyTooSlow,
    Forbidden,
    NoReplica,
    TurnError,
    Unauthorized,
)
from rose.gateway.turn_request import TurnRequest
from rose.process.http_port import LimitLog
from rose.security.callers import ANYBODY, TRAINER, Caller, ForeignJobError
from rose.security.certificates import EXPIRED, CertificateFiles, Peer, peer_over
from rose.security.roles import HTTP_CALLERS, Role
from rose.security.tokens import TokenRefusedError, TokenVerifier

OPEN_ROUTES: Final = frozenset({"/health", "/metrics"})
"""Routes of probes and scrapers, which have no credentials; they reveal no turn."""

CALLER: Final = web.RequestKey("rose.caller", Caller)
ROUTE_CHARS = 32
MINUTE_S = 60.0
MOST_A_MINUTE = 60
JSON = "application/json"
CONTINUE = "100-continue"
Route = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
# Bytes a second that extend a body's time limit; a slower sender has `body_timeout_s` in all.
LEAST_BYTES_S = 16 << 10


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
    except (RefusedError, UnavailableError, ConfigError) as error:
        return refusal(turn_error_of(error))
    except web.HTTPException as error:
        failed = TurnError(f"{http.method} {http.path}: {error.reason}")
        failed.status, failed.kind = error.status, error.reason
        return refusal(failed)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - a fault of this program ends one request only
        return refusal(fault(http, error))


def turn_error_of(error: RefusedError | UnavailableError | ConfigError) -> TurnError:
    """Return the TurnError that answers a request which this error has ended."""
    if isinstance(error, TurnError):
        return error
    return (NoReplica if isinstance(error, UnavailableError) else BadRequest)(str(error))


def refusal_headers(error: TurnError) -> dict[str, str]:
    """Return the headers Retry-After and WWW-Authenticate as the error needs them."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
    if error.status == Unauthorized.status:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def json_answer(answer: object, status: int = 200) -> web.Response:
    """Return an HTTP response whose body is this object as JSON, with this status."""
    return web.Response(status=status, body=encode(answer), content_type=JSON)


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


class Authenticator:
    """Authenticator of callers by token or certificate.

    clock: Unix seconds. say: called with each refusal to log, at most MOST_A_MINUTE times a minute.
    """

    def __init__(
        self,
        certificates: CertificateFiles | None,
        tokens: TokenVerifier | None,
        clock: Callable[[], float],
        say: Callable[..., None],
    ) -> None:
        self._cluster = certificates.identity.cluster if certificates else ""
        self._tokens = tokens
        self._asks = bool(certificates or tokens)
        self._clock = clock
        self._say = say
        self._minute_s = 0.0
        self._said = 0

    def admit(self, http: web.BaseRequest) -> None:
        """Store the request's caller in the request; open routes and a gateway without credentials
        admit anybody. Raises Unauthorized or Forbidden.
        """
        if not self._asks or http.path in OPEN_ROUTES:
            return
        try:
            http[CALLER] = self._caller(http)
        except (Unauthorized, Forbidden) as error:
            self._complain(http, str(error))
            raise

    def _caller(self, http: web.BaseRequest) -> Caller:
        peer = self._peer(http)
        bearer = http.headers.getall("Authorization", [])
        if not bearer:
            return self._by_certificate(peer)
        scheme, _, token = bearer[0].partition(" ")
        if len(bearer) > 1 or scheme.lower() != "bearer":
            raise Unauthorized("Authorization: send one header, Bearer TOKEN")
        if self._tokens is None:
            raise Unauthorized("this gateway takes no tokens: show a certificate instead")
        try:
            caller = self._tokens.caller(token.strip())
        except TokenRefusedError as error:
            raise Unauthorized(str(error)) from error
        if peer and peer.identity.role is Role.TRAINER and peer.identity.name != caller.job:
            raise Forbidden(
                f"the token is of job {caller.job!r} and the certificate of {peer.identity}: a"
                " token is shown by its own job"
            )
        return caller

    def _by_certificate(self, peer: Peer | None) -> Caller:
        if peer is None:
            raise Unauthorized("say who you are: Authorization: Bearer TOKEN, or a certificate")
        who = peer.identity
        if who.role not in HTTP_CALLERS:
            roles = " or ".join(sorted(HTTP_CALLERS))
            raise Forbidden(f"{who} may not use a gateway; {roles} may: use such a certificate")
        if who.role is Role.TRAINER:
            return Caller(who.name, TRAINER)
        return Caller(None, f"{who.role}/{who.name}")

    def _peer(self, http: web.BaseRequest) -> Peer | None:
        """Return the owner of the certificate that the caller showed and TLS verified; None without
        one. Raises Unauthorized or Forbidden.
        """
        try:
            peer = peer_over(http.transport)
        except ConfigError as error:
            raise Unauthorized(str(error)) from error
        if peer is None:
            return None
        if peer.not_after_s <= self._clock():
            raise Unauthorized(EXPIRED.format(peer.identity))
        if peer.identity.cluster != self._cluster:
            raise Forbidden(
                f"{peer.identity} is of cluster {peer.identity.cluster}; this is {self._cluster}"
            )
        return peer

    def _complain(self, http: web.BaseRequest, reason: str) -> None:
        now_s = self._clock()
        if not 0 <= now_s - self._minute_s < MINUTE_S:
            self._minute_s, self._said = now_s, 0
        self._said += 1
        if self._said <= MOST_A_MINUTE:
            # Log the route alone: the rest may be a secret that a caller mistook for a path.
            path = http.path.encode("utf-8", "replace").decode()[:ROUTE_CHARS]
            self._say("caller_refused", caller=str(http.remote), path=path, reason=reason)


def caller_of(http: web.BaseRequest) -> Caller:
    """Return the caller that `Authenticator.admit` stored in the request, ANYBODY without one."""
    found: Caller = http.get(CALLER, ANYBODY)
    return found


def held_to(caller: Caller, turn: TurnRequest) -> None:
    """Set the turn's job and name scope to its caller's. Raises Forbidden for another job."""
    if caller is ANYBODY:
        return
    turn.origin = replace(turn.origin, job=own_job(caller, turn.origin.job), scope=caller.scope)


def own_job(caller: Caller, asked: str) -> str:
    """Return the job of a request that names `asked` ("" for none), within what its caller may use.
    Raises Forbidden.
    """
    try:
        return caller.job_for(asked)
    except ForeignJobError as error:
        raise Forbidden(str(error), "job") from error
