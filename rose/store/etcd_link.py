"""EtcdLink: calls to an etcd cluster, by plain gRPC: several endpoints, TLS, login, who leads.

A request is tried on one endpoint after the other. An attempt that is not answered may have been
carried out; `UnansweredError` says so, and the store decides what that means.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from rose.errors import ConfigError, RoseError, UnavailableError
from rose.security.certificates import authorities_in, pair_in
from rose.store import etcd_pb2 as pb

R = TypeVar("R", bound=Message)
T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
Ask = Callable[[grpc.aio.Channel, Metadata, float], Awaitable[T]]

API = "/etcdserverpb."
TIMEOUT_S = 2.0
# An etcd without a leader elects one within some 2 s: a request outlasts that.
MOST_S = 5.0
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 0.5
OPTIONS = (
    # etcd closes connections that ping more often than each 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # gRPC waits a minute for the answer to a ping by default, and sends no ping meanwhile.
    ("grpc.http2.ping_timeout_ms", 3_000),
    # A watch sends nothing for hours: gRPC would stop pinging after two.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
)
TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}
# A token that a server forgot, as after its restart, or that is older than a change of the users.
STALE = ("invalid auth token", "revision of auth store is old", "user name is empty")
NO_LEASE = "requested lease not found"


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Endpoints (HOST:PORT) of a cluster, and what they must be shown.

    Keys are below `prefix`, so that clusters can be shared. Certificates are PEM files.
    """

    endpoints: tuple[str, ...]
    prefix: str = "rose/"
    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return TLS credentials, None for plain text. Raises `ConfigError`."""
        if self.ca_file is None:
            if self.certificate_file or self.key_file:
                raise ConfigError("a certificate for etcd needs the CA's too; give --store-ca FILE")
            return None
        if bool(self.certificate_file) != bool(self.key_file):
            raise ConfigError("give --store-cert FILE and --store-key FILE together, or neither")
        certificate, key = None, None
        if self.certificate_file and self.key_file:
            certificate, key, _ = pair_in(self.certificate_file, self.key_file)
        return grpc.ssl_channel_credentials(authorities_in(self.ca_file), key, certificate)


class UnansweredError(UnavailableError):
    """An attempt that was not answered: it may have been carried out, or still be."""


class StaleTokenError(UnavailableError):
    """An attempt that was refused, since its login is over; the next one logs in again."""


class NoLeaseError(RoseError):
    """The lease of a request is over."""


def unary(method: str, request: Message, reply: type[R]) -> Ask[R]:
    """Return the attempt that sends a request to a method of etcd, SERVICE/METHOD."""

    async def ask(channel: grpc.aio.Channel, metadata: Metadata, timeout_s: float) -> R:
        call = channel.unary_unary(
            API + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        answer = await call(request, timeout=timeout_s, metadata=metadata)
        assert isinstance(answer, reply)
        return answer

    return ask


def stream(
    channel: grpc.aio.Channel, method: str, request: type[Message], reply: type[Message]
) -> "grpc.aio.StreamStreamMultiCallable[Any, Any]":
    """Return a method of etcd with streams both ways."""
    return channel.stream_stream(
        API + method,
        request_serializer=request.SerializeToString,
        response_deserializer=reply.FromString,
    )


class EtcdLink:
    """Channels to all endpoints of a cluster; the one that answered last is asked first."""

    def __init__(self, access: EtcdAccess) -> None:
        self.access = access
        credentials = access.credentials()
        self.channels = [
            grpc.aio.secure_channel(each, credentials, OPTIONS)
            if credentials
            else grpc.aio.insecure_channel(each, OPTIONS)
            for each in access.endpoints
        ]
        self._at = 0
        self._token = ""

    @property
    def at(self) -> int:
        """The endpoint that is asked next."""
        return self._at

    def forget_login(self) -> None:
        """Log in again before the next request."""
        self._token = ""

    async def metadata(self, channel: grpc.aio.Channel) -> Metadata:
        """Return the metadata of a request, after a login where one is due."""
        if self.access.user and not self._token:
            await self._log_in(channel)
        # Without it a member that lost its cluster keeps a watch open, and silent.
        leader = (("hasleader", "true"),)
        return (*leader, ("token", self._token)) if self._token else leader

    async def call(self, ask: Ask[T], timeout_s: float = TIMEOUT_S, most_s: float = MOST_S) -> T:
        """Send a request that may be carried out twice. Raises `UnavailableError`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + most_s
        for attempt in itertools.count():
            try:
                return await self.attempt(ask, min(timeout_s, until_s - loop.time()))
            except (UnansweredError, StaleTokenError):
                pause_s = self.pause_s(attempt)
                if loop.time() + pause_s >= until_s:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("counted to the end")

    @staticmethod
    def pause_s(attempt: int) -> float:
        return min(FIRST_PAUSE_S * 2.0 ** min(attempt, 8), MAX_PAUSE_S)

    async def attempt(self, ask: Ask[T], timeout_s: float = TIMEOUT_S) -> T:
        """Ask one endpoint; the next attempt asks the next one if this did not answer.

        Raises `UnansweredError`, `StaleTokenError`, `NoLeaseError`, and `ConfigError` for a
        refusal.
        """
        channel = self.channels[self._at]
        try:
            metadata = await self.metadata(channel)
            return await ask(channel, metadata, max(0.05, timeout_s))
        except grpc.aio.AioRpcError as error:
            raise self._meaning(error) from error

    def _meaning(self, error: grpc.aio.AioRpcError) -> RoseError:
        code, details = error.code(), error.details() or ""
        if any(each in details for each in STALE) and self.access.user:
            self.forget_login()
            return StaleTokenError(f"etcd wants another login ({details})")
        if NO_LEASE in details:
            return NoLeaseError(details)
        if code in TRANSIENT:
            endpoint = self.access.endpoints[self._at]
            self._at = (self._at + 1) % len(self.channels)
            return UnansweredError(
                f"etcd at {endpoint} does not answer ({details}); check its cluster"
            )
        return self.refusal(details or code.name, code)

    def refusal(
        self, details: str, code: grpc.StatusCode = grpc.StatusCode.PERMISSION_DENIED
    ) -> RoseError:
        """Return the error that tells an operator what to do about a refusal."""
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return ConfigError(
                f"etcd does not let user {self.access.user or '(none)'} do this ({details}); grant"
                f" a role readwrite on the prefix {self.access.prefix!r}"
            )
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED):
            return ConfigError(
                f"etcd refuses the login ({details}); check --store-user and --store-password-file"
            )
        return UnavailableError(f"etcd refuses ({code.name}: {details}); check its alarms")

    async def _log_in(self, channel: grpc.aio.Channel) -> None:
        request = pb.AuthenticateRequest(name=self.access.user, password=self.access.password)
        try:
            ask = unary("Auth/Authenticate", request, pb.AuthenticateResponse)
            reply = await ask(channel, (), TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return  # this etcd has no users: it takes requests without
            raise
        self._token = reply.token

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close(None)
