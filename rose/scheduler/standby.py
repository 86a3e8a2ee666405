"""Replies of a scheduler process: as the leader of a term, or as a standby naming the leader.

A standby answers every call UNAVAILABLE, with the trailing metadata `rose-leader: HOST:PORT` (empty
while it knows of none). Such a call was surely not carried out, so it may be made again elsewhere.
"""

from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from typing_extensions import override

from rose.rpc import rose_pb2 as pb
from rose.rpc.leader_channel import LEADER_METADATA
from rose.scheduler.service import SchedulerService

STANDBY = "this scheduler is a standby; ask the one that leads"
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Scheduler"]
_METHODS: Final[dict[str, MethodDescriptor]] = {
    f"/{_SERVICE.full_name}/{method.name}": method for method in _SERVICE.methods
}
# By whether requests and replies are streams.
_KINDS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class LeaderHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Handlers of the scheduler's calls: those of a service while it leads, else refusals.

    leader: says the leader's address, "" while unknown.
    """

    def __init__(self, leader: Callable[[], str]) -> None:
        self._leader = leader
        self._service: SchedulerService | None = None

    @property
    def leads(self) -> bool:
        return self._service is not None

    @property
    def service_now(self) -> SchedulerService | None:
        """The service that answers, None while this process stands by."""
        return self._service

    def lead(self, service: SchedulerService) -> None:
        """Let the service answer from now on."""
        self._service = service

    def stand_by(self) -> None:
        """Refuse all calls from now on."""
        self._service = None

    def refused(self, who: str, method: str, reason: str) -> None:
        """Record a call that its caller's certificate did not allow; a standby serves nobody."""
        if self._service is not None:
            self._service.refused(who, method, reason)

    @override
    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = _METHODS.get(handler_call_details.method)
        if method is None:
            return None
        answer = self._refuse if self._service is None else getattr(self._service, method.name)
        handler: grpc.RpcMethodHandler[Any, Any] = _KINDS[
            method.client_streaming, method.server_streaming
        ](
            answer,
            getattr(pb, method.input_type.name).FromString,
            getattr(pb, method.output_type.name).SerializeToString,
        )
        return handler

    async def _refuse(self, request: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        del request
        metadata = ((LEADER_METADATA, self._leader()),)
        await context.abort(grpc.StatusCode.UNAVAILABLE, STANDBY, metadata)
