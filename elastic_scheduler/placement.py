"""A turn on a replica, and what it would be on another."""

from dataclasses import dataclass

from elastic_scheduler.replica_load import ReplicaLoad
from elastic_scheduler.routing_cost import TurnAsk
from elastic_scheduler.turn_need import TurnNeed

ENOUGH_FOR_PACE = 8
# Seconds that the turn would take there, and the replica.
Weighed = tuple[float, ReplicaLoad]


@dataclass(slots=True)
class Placement:
    """A live turn on a replica; handed back with every token count and at its end."""

    replica: str
    need: TurnNeed
    owed_tokens: int
    load: ReplicaLoad
    generated_tokens: int = 0
    first_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def pace_tok_s(self) -> float:
        """The turn's own rate since its first tokens; 0 while there are too few to tell."""
        tokens, elapsed_s = self.generated_tokens - self.first_tokens, self.last_s - self.first_s
        return tokens / elapsed_s if tokens >= ENOUGH_FOR_PACE and elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Quote:
    """Where a copy of a turn could run now, and the seconds that it would take there."""

    replica: str
    cost_s: float
    ask: TurnAsk
    load: ReplicaLoad
    weighed: list[Weighed]

    @property
    def places(self) -> int:
        """Turns that the replica could take now."""
        return self.load.view.max_sequences - self.load.live
