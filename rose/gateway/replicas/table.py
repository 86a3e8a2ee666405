"""The replicas that the gateway knows, from any source."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from elastic_scheduler import ReplicaKind, ReplicaView
from rose.contract.fields import UNVERSIONED
from rose.contract.gateway import IDLE, SERVING, SYNCING, ReplicaVersion


class ReplicaApi(StrEnum):
    """HTTP API that a replica speaks. Only ROSE's own endpoint stamps versions and obeys leases."""

    ROSE = "rose"
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """One row of the gateway's replica table; `policy_version` is UNVERSIONED if unknown, `job` the
    one that has its lease.
    """

    id: str
    kind: ReplicaKind
    url: str
    leased: bool
    lease_epoch: int
    healthy: bool
    policy_version: int
    max_sequences: int
    kv_tokens: int = 0
    decode_tok_s: float = 0.0
    prefill_tok_s: float = 0.0
    api: ReplicaApi = ReplicaApi.ROSE
    job: str = ""  # job that has the lease

    def view(self) -> ReplicaView:
        """Return the row as the router takes it; it is usable if it is leased and healthy."""
        return ReplicaView(
            id=self.id,
            kind=self.kind,
            usable=self.leased and self.healthy,
            policy_version=self.policy_version,
            max_sequences=self.max_sequences,
            kv_tokens=self.kv_tokens,
            decode_tok_s=self.decode_tok_s,
            prefill_tok_s=self.prefill_tok_s,
        )

    def served(self) -> ReplicaVersion:
        """Return the row as callers see it in `/rose/v1/versions`: state, job and version, None if
        unknown.
        """
        state = IDLE if not self.leased else SERVING if self.healthy else SYNCING
        version = None if self.policy_version == UNVERSIONED else self.policy_version
        return ReplicaVersion(self.id, self.kind.value, self.job, version, state)

    def continues(self, newer: "ReplicaEntry | None") -> bool:
        """Return True if turns that run under this row may continue under `newer`: same URL and
        same lease epoch.
        """
        return (
            newer is not None
            and newer.leased
            and newer.lease_epoch == self.lease_epoch
            and newer.url == self.url
        )


# Function that takes a new table: all replicas, and all registered jobs, none if they are unknown.
TableSink = Callable[[tuple[ReplicaEntry, ...], tuple[str, ...]], None]
