"""EtcdStore: the store in an etcd cluster, through etcd's own API by plain gRPC.

What etcd's API leaves to its clients:

- A transaction that was not answered may have been done. It is asked again only after reading back:
  if what it expected still holds it was not done; if its values are there, it was.
- A watch goes on from the revision after the newest event, or after a progress notification that
  carries no events: a header beside events may be ahead of them.
- Where history was compacted the watch lists again and yields the difference.
- A stale login ends a watch as "canceled", for reasons that differ by version: it logs in again
  before it believes them.
- The cluster's leader counts a lease's life, and counts anew once it is elected: a lease may live
  for a TTL longer than it was kept. What must not happen twice is fenced by revisions.

`EtcdLink` tries a request on one endpoint after the other. An attempt that is not answered may have
been carried out; `UnansweredError` says so, and the store decides what that means.
"""

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from typing_extensions import override

from rose.errors import ConfigError, RoseError, UnavailableError
from rose.security.certificates import authorities_in, pair_in
from rose.store import etcd_pb2 as pb
from rose.store.protocol import (
    ABSENT,
    Expect,
    LeaseGoneError,
    Listing,
    Put,
    StoreChange,
    StoreEntry,
    TxnStore,
    Write,
    difference,
    note,
)

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
# A lease is kept well within its life, or another endpoint is asked.
KEEP_ATTEMPT_S = 0.5
KEEP_S = 1.5
WATCH_PAUSE_S = 0.1
MAX_WATCH_PAUSE_S = 1.0
# A login is renewed so often before a refusal of a watch is believed.
WATCH_LOGINS = 3


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Endpoints (HOST:PORT) of an etcd cluster, login, and certificates as PEM files.

    All keys are below `prefix`, so that a cluster can be shared.
    """

    endpoints: tuple[str, ...]
    prefix: str = "rose/"
    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return TLS credentials for gRPC, None for plain text. Raises `ConfigError`."""
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
    """Error of an attempt that was not answered: it may have been carried out, or still be."""


class StaleTokenError(UnavailableError):
    """Error of an attempt refused since its login is stale; the next attempt logs in again."""


class NoLeaseError(RoseError):
    """Error of a request whose lease has ended."""


def unary(method: str, request: Message, reply: type[R]) -> Ask[R]:
    """Return a function that sends `request` once to an etcd method, SERVICE/METHOD, on a channel.

    The function returns the reply.
    """

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
    """Return an etcd method, SERVICE/METHOD, with streams both ways, on a channel."""
    return channel.stream_stream(
        API + method,
        request_serializer=request.SerializeToString,
        response_deserializer=reply.FromString,
    )


class EtcdLink:
    """Channels to all endpoints of an etcd cluster, and its login token.

    The endpoint that answered last is asked first.
    """

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
        """Index of the endpoint that is asked next."""
        return self._at

    def forget_login(self) -> None:
        """Drop the login token, so that the next request logs in again."""
        self._token = ""

    async def metadata(self, channel: grpc.aio.Channel) -> Metadata:
        """Return the gRPC metadata of a request, after a login on the channel if one is needed."""
        if self.access.user and not self._token:
            await self._log_in(channel)
        # Without it a member that lost its cluster keeps a watch open, and silent.
        leader = (("hasleader", "true"),)
        return (*leader, ("token", self._token)) if self._token else leader

    async def call(self, ask: Ask[T], timeout_s: float = TIMEOUT_S, most_s: float = MOST_S) -> T:
        """Return the reply to a request that may be carried out twice, trying endpoints for
        `most_s`.

        Raises `UnavailableError` if none answers, and other errors as `attempt` does.
        """
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
        """Return the seconds to wait after attempt number `attempt`, from 0.05 up to 0.5."""
        return min(FIRST_PAUSE_S * 2.0 ** min(attempt, 8), MAX_PAUSE_S)

    async def attempt(self, ask: Ask[T], timeout_s: float = TIMEOUT_S) -> T:
        """Return the reply of one endpoint, asked once; if it does not answer the next attempt asks
        another.

        Raises `UnansweredError`, `StaleTokenError`, `NoLeaseError`, and `ConfigError` or
        `UnavailableError` for a refusal.
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
        """Return the error for a refused request, which tells an operator what to do."""
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


@dataclass(frozen=True, slots=True)
class _Readback:
    """Outcome of a transaction, read back; `revision` is None if it did not commit."""

    expected_holds: bool
    revision: int | None


class EtcdStore(TxnStore):
    """Store in an etcd cluster (3.4 or newer). Make it in a running event loop."""

    def __init__(self, access: EtcdAccess) -> None:
        self._link = EtcdLink(access)
        self._prefix = access.prefix.encode()

    # ---- entries ----

    async def get(self, key: str) -> StoreEntry | None:
        reply = await self._link.call(self._range(self._key(key)))
        return self._entry(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str) -> Listing:
        begin = self._key(prefix)
        reply = await self._link.call(self._range(begin, end_of(begin)))
        return Listing(prefix, tuple(map(self._entry, reply.kvs)), reply.header.revision)

    @override
    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        request = pb.TxnRequest(
            compare=[
                pb.Compare(
                    key=self._key(each.key),
                    target=pb.Compare.MOD,
                    result=pb.Compare.EQUAL,
                    mod_revision=each.revision,
                )
                for each in expect
            ],
            success=[self._operation(each) for each in writes],
        )
        try:
            return await self._done_once(unary("KV/Txn", request, pb.TxnResponse), expect, writes)
        except NoLeaseError as error:
            raise LeaseGoneError("the lease is over; take another one") from error

    async def _done_once(
        self, ask: Ask[pb.TxnResponse], expect: Sequence[Expect], writes: Sequence[Write]
    ) -> int | None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + MOST_S
        unknown = False
        for attempt in itertools.count():
            try:
                reply = await self._link.attempt(ask, min(TIMEOUT_S, until_s - loop.time()))
            except (UnansweredError, StaleTokenError) as error:
                unknown = unknown or isinstance(error, UnansweredError)
                pause_s = self._link.pause_s(attempt)
                if loop.time() + pause_s >= until_s:
                    raise
                await asyncio.sleep(pause_s)
            else:
                if reply.succeeded:
                    return reply.header.revision
                if not unknown:
                    return None
            if unknown and expect:
                found = await self._read_back(expect, writes)
                if not found.expected_holds:
                    return found.revision
        raise AssertionError("counted to the end")

    async def _read_back(self, expect: Sequence[Expect], writes: Sequence[Write]) -> _Readback:
        """Return the outcome of a transaction, from the keys that it expected and wrote."""
        keys = list(dict.fromkeys(each.key for each in (*expect, *writes)))
        request = pb.TxnRequest(
            success=[
                pb.RequestOp(request_range=pb.RangeRequest(key=self._key(key))) for key in keys
            ]
        )
        reply = await self._link.call(unary("KV/Txn", request, pb.TxnResponse))
        found = {
            key: each.response_range.kvs[0] if each.response_range.kvs else None
            for key, each in zip(keys, reply.responses, strict=True)
        }
        revisions = {key: kv.mod_revision if kv else ABSENT for key, kv in found.items()}
        if all(revisions[each.key] == each.revision for each in expect):
            return _Readback(True, None)
        wanted = {each.key: each.value if isinstance(each, Put) else None for each in writes}
        there = {key: kv.value if (kv := found[key]) else None for key in wanted}
        # All of a transaction is written at one revision.
        written = {revisions[each.key] for each in writes if isinstance(each, Put)}
        if there != wanted or len(written) > 1:
            return _Readback(False, None)
        return _Readback(False, written.pop() if written else reply.header.revision)

    async def watch(self, since: Listing) -> AsyncGenerator[StoreChange, None]:
        known = {entry.key: entry.revision for entry in since.entries}
        seen, at, pause_s, refused = since.revision, self._link.at, WATCH_PAUSE_S, 0
        while True:
            compacted, told = False, False
            async with aclosing(self._answers(since.prefix, seen + 1, at)) as answers:
                async for answer in answers:
                    if compacted := bool(answer.compact_revision):
                        break
                    if answer.canceled:
                        refused = self._refused(refused, answer.cancel_reason)
                        break
                    refused, told = 0, told or bool(answer.events)
                    for change in map(self._change, answer.events):
                        seen = change.revision
                        note(known, change)
                        yield change
                    # Only a notification without events promises that all up to it was sent.
                    if not answer.events and not answer.created:
                        seen = max(seen, answer.header.revision)
            if compacted:
                with suppress(UnavailableError):
                    listing = await self.list(since.prefix)
                    for change in difference(known, listing):
                        note(known, change)
                        yield change
                    seen = listing.revision
            at = (at + 1) % len(self._link.channels)
            pause_s = WATCH_PAUSE_S if told or compacted else min(2 * pause_s, MAX_WATCH_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _refused(self, before: int, reason: str) -> int:
        """Return the number of refused watches in a row, and log in again; raise after three."""
        self._link.forget_login()
        if before + 1 >= WATCH_LOGINS:
            raise self._link.refusal(reason)
        return before + 1

    async def _answers(
        self, prefix: str, revision: int, at: int
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        """Yield the watch responses of one endpoint until its stream ends."""
        begin = self._key(prefix)
        create = pb.WatchCreateRequest(
            key=begin, range_end=end_of(begin), start_revision=revision, progress_notify=True
        )
        channel = self._link.channels[at]
        call = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                metadata = await self._link.metadata(channel)
                watch = stream(channel, "Watch/Watch", pb.WatchRequest, pb.WatchResponse)
                call = watch(None, metadata=metadata)
                await call.write(pb.WatchRequest(create_request=create))
                answer = await call.read()
            while isinstance(answer, pb.WatchResponse):
                yield answer
                answer = await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._link.forget_login()
        except TimeoutError:
            return
        finally:
            if call is not None:
                call.cancel()

    async def compact(self, revision: int) -> None:
        """Delete the history up to a revision, of all keys of the etcd cluster."""
        request = pb.CompactionRequest(revision=revision, physical=True)
        await self._link.attempt(unary("KV/Compact", request, pb.CompactionResponse))

    # ---- leases ----

    async def grant_lease(self, ttl_s: float) -> int:
        """Return the id of a new lease; etcd rounds `ttl_s` up to seconds, and has a minimum."""
        request = pb.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        ask = unary("Lease/LeaseGrant", request, pb.LeaseGrantResponse)
        return (await self._link.call(ask)).ID

    async def keep_lease(self, lease: int) -> float:
        async def ask(channel: grpc.aio.Channel, metadata: Metadata, timeout_s: float) -> float:
            keep = stream(
                channel, "Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
            )
            call = keep(None, timeout=timeout_s, metadata=metadata)
            try:
                await call.write(pb.LeaseKeepAliveRequest(ID=lease))
                answer = await call.read()
            finally:
                call.cancel()
            if not isinstance(answer, pb.LeaseKeepAliveResponse):
                raise UnansweredError("etcd ended a lease's stream; check its cluster")
            return float(answer.TTL)

        return await self._link.call(ask, KEEP_ATTEMPT_S, KEEP_S)

    async def revoke_lease(self, lease: int) -> None:
        request = pb.LeaseRevokeRequest(ID=lease)
        ask = unary("Lease/LeaseRevoke", request, pb.LeaseRevokeResponse)
        with suppress(NoLeaseError):
            await self._link.call(ask)

    async def close(self) -> None:
        await self._link.close()

    # ---- keys and messages ----

    def _key(self, key: str) -> bytes:
        return self._prefix + key.encode() or b"\0"

    def _name(self, key: bytes) -> str:
        return key[len(self._prefix) :].decode()

    def _entry(self, kv: pb.KeyValue) -> StoreEntry:
        return StoreEntry(self._name(kv.key), kv.value, kv.mod_revision)

    def _change(self, event: pb.Event) -> StoreChange:
        value = None if event.type == pb.Event.DELETE else event.kv.value
        return StoreChange(self._name(event.kv.key), value, event.kv.mod_revision)

    def _operation(self, write: Write) -> pb.RequestOp:
        key = self._key(write.key)
        if isinstance(write, Put):
            put = pb.PutRequest(key=key, value=write.value, lease=write.lease)
            return pb.RequestOp(request_put=put)
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))

    def _range(self, begin: bytes, end: bytes = b"") -> Ask[pb.RangeResponse]:
        request = pb.RangeRequest(key=begin, range_end=end)
        return unary("KV/Range", request, pb.RangeResponse)


def end_of(prefix: bytes) -> bytes:
    """Return the first key after all keys with the prefix; etcd's "no end" if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"
