"""A scheduler that answers operators in this process."""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack

import grpc
import pytest

from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server

Serve = Callable[[SchedulerServicer], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a scheduler's methods; return their address."""
    with ExitStack() as stack:

        def begin(servicer: SchedulerServicer) -> str:
            server = grpc.server(futures.ThreadPoolExecutor(1))
            add_SchedulerServicer_to_server(servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            stack.callback(lambda: server.stop(0).wait())
            return f"127.0.0.1:{port}"

        yield begin
