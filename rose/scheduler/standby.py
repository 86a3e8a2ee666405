"""Replies of a scheduler process: as the leader of a term, or as a standby naming the leader.

A standby answers every call UNAVAILABLE, with the trailing metadata `rose-leader: HOST:PORT` (empty
while it knows of none). Such a call was surely not carried out, so it may be made again elsewhere.
"""

from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from typing_extensions import override

from rose.rpc.leader_channel import LEADER_METADATA
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from rose.scheduler.service import SchedulerService

STANDBY = "this scheduler is a standby; ask the one that leads"


class LeaderHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Handlers of the scheduler's calls: those of a service while it leads, else refusals.

    leader: says the leader's address, "" while unknown.
    """

    def __init__(self, leader: Callable[[], str]) -> None:
        self._leader = leader
        self._refusals = {
            method: _like(handler, self._refuse)
            for method, handler in _handlers_of(SchedulerServicer()).items()  # type: ignore[abstract]
        }
        self._now = self._refusals
        self._service: SchedulerService | None = None

    @property
    def leads(self) -> bool:
        return self._now is not self._refusals

    @property
    def service_now(self) -> SchedulerService | None:
        """The service that answers, None while this process stands by."""
        return self._service

    def lead(self, service: SchedulerService) -> None:
        """Let the service answer from now on."""
        self._now = _handlers_of(service)
        self._service = service

    def stand_by(self) -> None:
        """Refuse all calls from now on."""
        self._now = self._refusals
        self._service = None

    def refused(self, who: str, method: str, reason: str) -> None:
        """Record a call that its caller's certificate did not allow; a standby serves nobody."""
        if self._service is not None:
            self._service.refused(who, method, reason)

    @override
    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        return self._now.get(handler_call_details.method)

    async def _refuse(self, request: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        del request
        metadata = ((LEADER_METADATA, self._leader()),)
        await context.abort(grpc.StatusCode.UNAVAILABLE, STANDBY, metadata)


class _Capture:
    """In the place of a server: keeps the handlers that the generated code registers."""

    def __init__(self) -> None:
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same ones, without their names."""

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        self.handlers = {f"/{service}/{name}": each for name, each in handlers.items()}


def _handlers_of(service: SchedulerServicer) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
    capture = _Capture()
    add_SchedulerServicer_to_server(service, capture)  # type: ignore[arg-type]
    return capture.handlers


def _like(
    handler: "grpc.RpcMethodHandler[Any, Any]", answer: Callable[..., object]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Return a handler for calls of the same kind."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(handler.request_streaming, handler.response_streaming)]
    return make(answer, handler.request_deserializer, handler.response_serializer)
