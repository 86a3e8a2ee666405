"""What a node offers: a replica's capacity, for a short time."""

import math
from dataclasses import dataclass
from enum import StrEnum

# An offer is what somebody else says. Beyond any real figure, and far enough below what doubles,
# sums and messages hold: no figure in these bounds can break or poison what is reckoned from it.
MAX_EPOCH = 2**53
MAX_VERSION = 2**53
MAX_KV_TOKENS = 2**40
MAX_SEQUENCES = 2**20
MAX_TOK_S = 1e9
MAX_TTL_S = 3_600.0
MAX_NAME_CHARS = 253
MAX_URL_CHARS = 2_048


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
        """Raises ValueError for what no replica can mean."""
        for name, text in (("id", self.replica), ("node", self.node)):
            if not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable():
                raise ValueError(
                    f"a replica's {name} is {text[:40]!r}; give 1 to {MAX_NAME_CHARS} printable"
                    " characters"
                )
        if not 0 < len(self.url) <= MAX_URL_CHARS:
            raise ValueError(f"the offer of {self.replica} has no url, or one without end")
        if not 0 < self.ttl_s <= MAX_TTL_S:
            raise ValueError(
                f"ttl_s of {self.replica} is {self.ttl_s}; offer for a time above 0, up to"
                f" {MAX_TTL_S:.0f}"
            )
        for figure, value, most in (
            ("kv_tokens", self.kv_tokens, MAX_KV_TOKENS),
            ("decode_tok_s", self.decode_tok_s, MAX_TOK_S),
            ("prefill_tok_s", self.prefill_tok_s, MAX_TOK_S),
            ("policy_version", self.policy_version, MAX_VERSION),
            ("epoch", self.epoch, MAX_EPOCH),
            ("max_sequences", self.max_sequences, MAX_SEQUENCES),
        ):
            if not (math.isfinite(value) and 0 <= value <= most):
                raise ValueError(
                    f"{figure} of {self.replica} is {value}; offer a figure of 0 to {most:.0f}"
                )

    def is_stale(self, received_s: float, now_s: float) -> bool:
        """Whether the offer that arrived at `received_s` has run out at `now_s`."""
        return now_s >= received_s + self.ttl_s
