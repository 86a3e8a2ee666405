"""What a node offers: a replica's capacity, for a short time."""

from dataclasses import dataclass
from enum import StrEnum


class ReplicaKind(StrEnum):
    """Where a rollout engine lives."""

    GUEST = "guest"
    DEDICATED = "dedicated"


@dataclass(frozen=True, slots=True)
class Offer:
    """One replica's capacity; it is stale, and worth nothing, `ttl_s` after it arrived.

    `epoch` is the newest lease epoch that the node has seen for the replica: the next lease's is
    greater. Rates are tokens per second at full batch, 0 where the node does not know them.
    """

    replica: str
    kind: ReplicaKind
    url: str
    node: str
    kv_tokens: int
    decode_tok_s: float
    prefill_tok_s: float
    policy_version: int
    healthy: bool
    ttl_s: float
    epoch: int
    max_sequences: int

    def __post_init__(self) -> None:
        if not self.replica or not self.url:
            raise ValueError("an offer needs a replica id and a url")
        if self.ttl_s <= 0:
            raise ValueError(f"ttl_s of {self.replica} is {self.ttl_s}; offer for a time above 0")
        if min(self.kv_tokens, self.epoch, self.max_sequences, self.policy_version) < 0:
            raise ValueError(f"the offer of {self.replica} has a negative count")

    def is_stale(self, received_s: float, now_s: float) -> bool:
        """Whether the offer that arrived at `received_s` has run out at `now_s`."""
        return now_s >= received_s + self.ttl_s
