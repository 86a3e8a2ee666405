"""One replica as the router sees it, and the turns that it was given."""

import math
from dataclasses import dataclass

from elastic_scheduler.offer import ReplicaKind
from elastic_scheduler.rate import RateMeter

# Used where a node does not know its rates: any figure serves if all such replicas get the same.
UNKNOWN_DECODE_TOK_S = 1_000.0
UNKNOWN_PREFILL_TOK_S = 10_000.0
# A stalled replica's rate goes to zero; its cost must stay finite to be compared.
MIN_RATE_TOK_S = 0.1
# Revocations are rare next to turns: an estimate starts from one in ten minutes, and a replica's
# own history outweighs that after ten minutes of turns.
PRIOR_REVOKES = 1.0
PRIOR_REVOKE_S = 600.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as the router sees it; `usable` means leased and healthy."""

    id: str
    kind: ReplicaKind
    usable: bool
    policy_version: int
    max_sequences: int
    kv_tokens: int = 0
    decode_tok_s: float = 0.0
    prefill_tok_s: float = 0.0


class ReplicaLoad:
    """Live turns, tokens owed to them, and what was measured. Times are monotonic seconds."""

    __slots__ = (
        "bucket",
        "busy_s",
        "busy_since_s",
        "decode_tok_s",
        "heard_s",
        "live",
        "meter",
        "owed",
        "pace_tok_s",
        "placed_owed",
        "prefill_tok_s",
        "resting_until_s",
        "revokes",
        "slot",
        "view",
    )

    def __init__(self, view: ReplicaView, now_s: float) -> None:
        self.meter = RateMeter(view.decode_tok_s or UNKNOWN_DECODE_TOK_S, now_s)
        self.view = view
        self.prefill_tok_s = view.prefill_tok_s or UNKNOWN_PREFILL_TOK_S
        self.decode_tok_s = view.decode_tok_s or UNKNOWN_DECODE_TOK_S
        self.live = 0
        self.owed = 0
        self.heard_s = 0.0
        # Rate of one turn among others; 0 until one ended here.
        self.pace_tok_s = 0.0
        self.resting_until_s = 0.0
        self.busy_s = 0.0
        self.busy_since_s = 0.0
        self.revokes = 0
        # Where the index keeps this replica; None: nowhere.
        self.bucket: list[ReplicaLoad] | None = None
        self.slot = 0
        self.placed_owed = 0

    def set_view(self, view: ReplicaView) -> None:
        """Take a newer row of the table; what was measured stays."""
        self.view = view
        self.prefill_tok_s = view.prefill_tok_s or UNKNOWN_PREFILL_TOK_S
        self.meter.set_offered(view.decode_tok_s or UNKNOWN_DECODE_TOK_S)

    @property
    def is_open(self) -> bool:
        """Whether the replica is below its cap."""
        return self.live < self.view.max_sequences

    def add_turn(self, tokens: int, now_s: float) -> None:
        """Count a turn in that is expected to make `tokens`."""
        if self.live == 0:
            self.meter.set_busy(True, now_s)
            self.heard_s = now_s
            self.busy_since_s = now_s
        self.live += 1
        self.owed += tokens

    def drop_turn(self, owed_tokens: int, now_s: float, revoked: bool) -> None:
        """Count a turn out that still had `owed_tokens` to make."""
        self.live -= 1
        self.owed -= owed_tokens
        self.revokes += revoked
        if self.live == 0:
            self.meter.set_busy(False, now_s)
            self.busy_s += now_s - self.busy_since_s

    def wait_s(self, tokens: float, now_s: float) -> float:
        """Seconds until `tokens` more are decoded: behind the owed ones, and after the silence.

        A pause that has lasted t is expected to last as long again, so silence counts in full.
        """
        rate_tok_s = self.decode_tok_s = self.meter.tok_s(now_s)
        if rate_tok_s < MIN_RATE_TOK_S:
            rate_tok_s = MIN_RATE_TOK_S
        cost_s = (self.owed + tokens) / rate_tok_s
        return cost_s + now_s - self.heard_s if self.live else cost_s

    def revoke_chance(self, duration_s: float, now_s: float) -> float:
        """P(the lease ends within `duration_s`), from this replica's own time with turns.

        A dedicated replica is its job's own: nobody takes it back.
        """
        if self.view.kind is ReplicaKind.DEDICATED:
            return 0.0
        busy_s = self.busy_s + (now_s - self.busy_since_s if self.live else 0.0)
        per_s = (self.revokes + PRIOR_REVOKES) / (busy_s + PRIOR_REVOKE_S)
        return -math.expm1(-duration_s * per_s)
