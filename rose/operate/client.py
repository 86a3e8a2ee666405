"""Calls of an operator to the leading scheduler of a list; a failure is one line."""

import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from rose.errors import ConfigError, RefusedError, RoseError, UnavailableError
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_blocking_channel
from rose.rpc.leader_channel import CONNECT_S, LeaderFinder, hint_of
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.security.certificates import CertificateFiles

CALL_TIMEOUT_S: Final = 5.0

if TYPE_CHECKING:
    # The checks of policies take long to import, and most calls need none of them.
    from elastic_scheduler.capacity import CapacityPolicy


Reply = TypeVar("Reply")
_SAID_NO: Final = {
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}


class SchedulerClient:
    """Operator's blocking client of the leading scheduler among the given addresses.

    All calls raise `UnavailableError` if no leader answers, `RefusedError` if it refuses, and
    `ConfigError` for invalid arguments.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = CALL_TIMEOUT_S,
        certificates: CertificateFiles | None = None,
    ) -> None:
        self._finder = LeaderFinder(address)
        self._address = address
        self._timeout_s = timeout_s
        self._certificates = certificates
        # A standby that answered last, and whom it named.
        self._standby: tuple[str, str] | None = None

    def snapshot(self) -> pb.SnapshotReply:
        """Return the scheduler's whole present state."""
        return self._call(lambda stub: stub.Snapshot(pb.SnapshotRequest(), timeout=self._timeout_s))

    def set_harvest(self, mode: "pb.HarvestMode.ValueType", replica: str) -> int:
        """Set the lending mode of a replica, or of the cluster (""); return the number of leases
        released.

        If no policy is in force, a cluster mode other than OFF also puts one in force that lends
        everything.
        """
        request = pb.SetHarvestRequest(mode=mode, replica=replica)
        return self._call(lambda stub: stub.SetHarvest(request, timeout=self._timeout_s)).released

    def end_job(self, job: str) -> int:
        """End a job; return the number of leases that are being released."""
        request = pb.EndJobRequest(job=job)
        return self._call(lambda stub: stub.EndJob(request, timeout=self._timeout_s)).released

    def drop_job(self, job: str, *, force: bool = False) -> int:
        """End a job and delete its versions and run; return the number of deleted versions.

        force: do so even while the job's run lives.
        """
        request = pb.DropJobRequest(job=job, force=force)
        return self._call(lambda stub: stub.DropJob(request, timeout=self._timeout_s)).versions

    def revoke(self, replica: str, reason: str) -> int:
        """Revoke the replica's lease; return the lease's epoch."""
        request = pb.RevokeRequest(replica=replica, reason=reason)
        return self._call(lambda stub: stub.Revoke(request, timeout=self._timeout_s)).epoch

    def _call(self, ask: Callable[[SchedulerStub], Reply]) -> Reply:
        """Return the leader's reply; a call is repeated only if it was surely not carried out."""
        until_s = time.monotonic() + self._timeout_s
        self._standby = None
        while True:
            found, hint = False, ""
            with make_blocking_channel(self._finder.address, self._certificates) as channel:
                # With one address the failed call itself says why it cannot be reached, and
                # gRPC's word on a connection takes a fifth of a second to come.
                if len(self._finder.addresses) == 1 or _connects(channel):
                    try:
                        return ask(SchedulerStub(channel))
                    except grpc.RpcError as error:
                        named = hint_of(error)
                        if named is None:
                            raise self._meaning(error.code(), error.details()) from error
                        found, hint = True, named
                        self._standby = self._finder.address, named
            self._finder.missed(hint)
            pause_s = self._finder.pause_s
            alone = len(self._finder.addresses) == 1 and not found
            if alone or time.monotonic() + pause_s >= until_s:
                raise self._meaning(grpc.StatusCode.UNAVAILABLE, None)
            time.sleep(pause_s)

    def _meaning(self, code: grpc.StatusCode, details: str | None) -> RoseError:
        if code in _SAID_NO:
            return RefusedError(details)
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return ConfigError(details)
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return UnavailableError(self._nobody(details or ""))
        return UnavailableError(
            f"{self._address} answers, but not as a scheduler ({code.name}); check --scheduler"
        )

    def _nobody(self, details: str) -> str:
        if self._standby is not None:
            address, named = self._standby
            of = (
                f" for {named}, which does not answer here" if named else ", and knows of no leader"
            )
            return (
                f"{address} stands by{of}; ask again in a moment, or give --scheduler the addresses"
                " of all schedulers; in a port-forward name svc/rose-leader, which leads to it"
            )
        return (
            f"no scheduler answers at {self._address} as the leader; start `rose scheduler`"
            f" or give --scheduler HOST:PORT{self._hint(details)}"
        )

    def _hint(self, details: str) -> str:
        """Return a hint for a failed TLS handshake, "" for other failures."""
        if not any(word in details for word in ("Socket closed", "andshake", "erification")):
            return ""
        if self._certificates is None:
            return "; if it asks for certificates, give --ca, --certificate and --key"
        return (
            "; it may have refused the certificate, or be none of this cluster's: see `rose certs"
            " show`"
        )


class PolicyClient(SchedulerClient):
    """Operator's client of the leading scheduler, with calls about capacity policies.

    Raises as `SchedulerClient` does.
    """

    def policies(self) -> list[pb.PolicyView]:
        """Return all capacity policies in force."""
        ask = pb.ListPoliciesRequest()
        return list(self._call(lambda s: s.ListPolicies(ask, timeout=self._timeout_s)).policies)

    def apply(self, policy: "CapacityPolicy") -> bool:
        """Put a policy in force; return True if that changed anything."""
        ask = pb.ApplyPolicyRequest(policy=policy.to_json())
        return self._call(lambda s: s.ApplyPolicy(ask, timeout=self._timeout_s)).changed

    def outlook(self, policy: "CapacityPolicy") -> pb.ApplyPolicyReply:
        """Return what applying a policy would change: nodes, and guests whose leases would end."""
        ask = pb.ApplyPolicyRequest(policy=policy.to_json(), dry_run=True)
        return self._call(lambda s: s.ApplyPolicy(ask, timeout=self._timeout_s))

    def delete(self, name: str) -> None:
        """Take the policy of that name out of force."""
        ask = pb.DeletePolicyRequest(name=name)
        self._call(lambda s: s.DeletePolicy(ask, timeout=self._timeout_s))

    def explain(self, node: str) -> list[pb.NodeCapacity]:
        """Return, for one node or for all (""), the policy that decides each field."""
        ask = pb.ExplainPolicyRequest(node=node)
        return list(self._call(lambda s: s.ExplainPolicy(ask, timeout=self._timeout_s)).nodes)

    def stop(self, mode: "pb.HarvestMode.ValueType", replica: str = "") -> int:
        """Set the operator's stop of the cluster or a replica; return the number of leases
        released.

        Unlike `set_harvest` it never puts a policy in force.
        """
        ask = pb.SetHarvestRequest(mode=mode, replica=replica, stop_alone=True)
        return self._call(lambda s: s.SetHarvest(ask, timeout=self._timeout_s)).released


def _connects(channel: grpc.Channel) -> bool:
    """Return True if the channel connects before a short timeout."""
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    channel.subscribe(states.put, try_to_connect=True)
    until_s = time.monotonic() + CONNECT_S
    try:
        while True:
            state = states.get(timeout=max(0.0, until_s - time.monotonic()))
            if state is grpc.ChannelConnectivity.READY:
                return True
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return False
    except queue.Empty:
        return False
    finally:
        channel.unsubscribe(states.put)
