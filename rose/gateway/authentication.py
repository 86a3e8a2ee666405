"""Authentication of a gateway's callers, by certificate or token, which bound their names and jobs.

open routes                     ──► anybody
neither certificates nor tokens ──► ANYBODY (loopback, or a network that the operator fenced)
a token     ──► its job and subject; a trainer's certificate beside it must be of the same job
a certificate alone ──► trainer: its job; operator: any job; other roles: 403
nothing     ──► 401
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from aiohttp import web

from rose.errors import ConfigError
from rose.gateway.errors import Forbidden, Unauthorized
from rose.gateway.turn_request import TurnRequest
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
    """Set the turn's job and name scope to its caller's. Raises Forbidden if it names
    another job.
    """
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
