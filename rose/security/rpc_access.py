"""Access check of a gRPC server: each call against the table `RPCS`, by the caller's certificate.

    handshake: of our CA, not expired ──► identity, of this cluster ──► role may call the method
        ──► each request names its caller only ──► the service
    a stream ends with its caller's certificate; the caller reconnects with a newer one

Refused calls reach no service, so they change nothing; `on_refused` gets each with its reason.
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, cast

import grpc
import grpc.aio
from typing_extensions import override

from rose.errors import ConfigError, RoseError
from rose.security.certificates import EXPIRED, Peer, peer_of
from rose.security.roles import RPCS, Leave, Rules

OnRefused = Callable[[str, str, str], None]
"""Callback that is called for each refused call, with (caller, method, reason)."""

Context = grpc.aio.ServicerContext
Handler = Callable[[Any, "Context[Any, Any]"], Any]
FIRST_S = 1.0
_CERTIFICATE = "x509_pem_cert"


CALLING: ContextVar[str] = ContextVar("calling", default="")
"""Caller of the current gRPC call, such as `operator ada`; "" without certificates, and between
calls.
"""


class RefusedPeerError(RoseError):
    """Error: a caller may not make this call. code: gRPC status that it gets beside the message."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # in stubs only
    """gRPC interceptor that checks each call of a server against `RPCS`, by the caller's
    certificate.
    """

    def __init__(
        self,
        cluster: str,
        on_refused: OnRefused,
        rpcs: "dict[str, Rules] | None" = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the interceptor.

        cluster: the server's own, since a CA may sign for several. rpcs: another table than `RPCS`.
        clock: Unix seconds.
        """
        self._cluster = cluster
        self._on_refused = on_refused
        self._rpcs = RPCS if rpcs is None else rpcs
        self._clock = clock

    @override
    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return the handler wrapped in the access check, since the caller's certificate is known
        only when it runs.
        """
        handler = await continuation(handler_call_details)
        return handler and self._checked(handler_call_details.method.rpartition("/")[2], handler)

    def _checked(self, method: str, handler: Any) -> "grpc.RpcMethodHandler[Any, Any]":  # noqa: ANN401 - gRPC's four kinds
        takes, gives = (
            "stream" if streams else "unary"
            for streams in (handler.request_streaming, handler.response_streaming)
        )
        call = getattr(handler, f"{takes}_{gives}")
        checked = (
            self._unary(method, call)
            if takes == gives == "unary"
            else self._stream(method, call, streams_in=handler.request_streaming)
        )
        wrapped: grpc.RpcMethodHandler[Any, Any] = getattr(
            grpc, f"{takes}_{gives}_rpc_method_handler"
        )(checked, handler.request_deserializer, handler.response_serializer)
        return wrapped

    def _unary(self, method: str, call: Handler) -> Handler:
        async def checked(request: object, context: "Context[Any, Any]") -> object:
            try:
                peer, leave = self._admitted(method, context)
                _check(peer, leave, method, request)
            except RefusedPeerError as error:
                await self._refuse(method, context, error)
            CALLING.set(str(peer.identity))
            return await call(request, context)

        return checked

    def _stream(self, method: str, call: Handler, *, streams_in: bool) -> Handler:
        async def checked(given: object, context: "Context[Any, Any]") -> object:
            try:
                try:
                    peer, leave = self._admitted(method, context)
                except RefusedPeerError:
                    if streams_in:
                        await _first_of(cast(AsyncIterator[object], given))
                    raise
                if streams_in:
                    given = _each_checked(peer, leave, method, cast(AsyncIterator[object], given))
                else:
                    _check(peer, leave, method, given)
                CALLING.set(str(peer.identity))
                async with asyncio.timeout(peer.not_after_s - self._clock()) as life:
                    return await _called(call, given, context)
            except RefusedPeerError as error:
                await self._refuse(method, context, error)
            except TimeoutError:
                if not life.expired():
                    raise
                expired = RefusedPeerError(
                    grpc.StatusCode.UNAUTHENTICATED, EXPIRED.format(peer.identity)
                )
                await self._refuse(method, context, expired)
            return None

        return checked

    def _admitted(self, method: str, context: "Context[Any, Any]") -> tuple[Peer, Leave]:
        """Return the caller and its permission for the method.

        Raises RefusedPeerError if its certificate or role does not allow it.
        """
        peer = _peer(context)
        who = peer.identity
        if peer.not_after_s <= self._clock():
            # The connection is older than the expiry: TLS refuses new ones with such a certificate.
            raise RefusedPeerError(grpc.StatusCode.UNAUTHENTICATED, EXPIRED.format(who))
        if who.cluster != self._cluster:
            raise RefusedPeerError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{who} is of cluster {who.cluster}; this is {self._cluster}",
            )
        rules = self._rpcs.get(method, {})
        leave = rules.get(who.role)
        if leave is None:
            allowed = " or ".join(rules) or "nobody"
            raise RefusedPeerError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{who} may not call {method}; {allowed} may: use such a certificate",
            )
        return peer, leave

    async def _refuse(
        self, method: str, context: "Context[Any, Any]", error: RefusedPeerError
    ) -> None:
        self._on_refused(_named(context), method, str(error))
        await context.abort(error.code, str(error))


async def _called(call: Handler, given: object, context: "Context[Any, Any]") -> object:
    """Run a handler: return a coroutine's reply, or send a generator's messages to the caller and
    return None.
    """
    result = call(given, context)
    if inspect.isasyncgen(result):
        async for message in result:
            await context.write(message)
        return None
    return await result


def _check(peer: Peer, leave: Leave, method: str, request: object) -> None:
    """Raise RefusedPeerError if a request's field names another caller."""
    if not leave.permits(peer.identity.name, request):
        said = str(getattr(request, leave.field))[:80]
        raise RefusedPeerError(
            grpc.StatusCode.PERMISSION_DENIED,
            f"{peer.identity} may not call {method} with {leave.field} {said!r}: only with"
            f" {leave.own}",
        )


async def _each_checked(
    peer: Peer, leave: Leave, method: str, requests: AsyncIterator[object]
) -> AsyncIterator[object]:
    async for request in requests:
        _check(peer, leave, method, request)
        yield request


async def _first_of(requests: AsyncIterator[object]) -> None:
    """Read and drop a refused caller's first message: a caller whose write breaks off never
    receives the reason.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_S):
            await anext(aiter(requests), None)


def _peer(context: "Context[Any, Any]") -> Peer:
    certificates = context.auth_context().get(_CERTIFICATE) or ()
    if not certificates:
        raise RefusedPeerError(
            grpc.StatusCode.UNAUTHENTICATED, "no certificate was shown; connect with one"
        )
    try:
        return peer_of(bytes(next(iter(certificates))))
    except ConfigError as error:
        raise RefusedPeerError(grpc.StatusCode.UNAUTHENTICATED, str(error)) from error


def _named(context: "Context[Any, Any]") -> str:
    try:
        return str(_peer(context).identity)
    except RefusedPeerError:
        # Omit the port, which changes with each connection.
        return str(context.peer()).rpartition(":")[0][:40]
