"""Calls to the scheduler, with their failures as errors that a person reads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from rose.errors import ConfigError, RefusedError, RoseError, UnavailableError
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import channel_options
from rose.rpc.rose_pb2_grpc import SchedulerStub

DEFAULT_SCHEDULER = "127.0.0.1:7400"
CALL_TIMEOUT_S = 5.0

Reply = TypeVar("Reply")


class SchedulerClient:
    """What an operator asks of a scheduler.

    Raises `UnavailableError` when it does not answer and `RefusedError` when it says no.
    """

    def __init__(self, address: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"{address!r} is no address; give --scheduler HOST:PORT")
        self._address = address
        self._timeout_s = timeout_s

    def snapshot(self) -> pb.SnapshotReply:
        """Everything the scheduler knows right now."""
        return self._call(lambda stub: stub.Snapshot(pb.SnapshotRequest(), timeout=self._timeout_s))

    def set_harvest(self, mode: "pb.HarvestMode.ValueType", replica: str) -> int:
        """Set the mode of one replica, or of the cluster (""); returns the leases it released."""
        request = pb.SetHarvestRequest(mode=mode, replica=replica)
        return self._call(lambda stub: stub.SetHarvest(request, timeout=self._timeout_s)).released

    def revoke(self, replica: str, reason: str) -> int:
        """End the replica's lease; returns its epoch."""
        request = pb.RevokeRequest(replica=replica, reason=reason)
        return self._call(lambda stub: stub.Revoke(request, timeout=self._timeout_s)).epoch

    def _call(self, ask: Callable[[SchedulerStub], Reply]) -> Reply:
        with self._explained(), grpc.insecure_channel(self._address, channel_options()) as channel:
            return ask(SchedulerStub(channel))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._meaning(error.code(), error.details()) from error

    def _meaning(self, code: grpc.StatusCode, details: str | None) -> RoseError:
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return RefusedError(details)
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return ConfigError(details)
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return UnavailableError(
                f"no scheduler answers at {self._address}; start `rose scheduler` or give"
                " --scheduler HOST:PORT"
            )
        return UnavailableError(
            f"{self._address} answers, but not as a scheduler ({code.name}); check --scheduler"
        )
