"""One delivered episode, with the origin of every token: what training, gap and records read."""

from dataclasses import dataclass, field

from rose.client import Turn

CONTINUED = "continued"


@dataclass(frozen=True, slots=True)
class TakenTurn:
    """One turn. `offset`: where its reply begins in the conversation (= its prompt's tokens)."""

    offset: int
    turn: Turn
    start_s: float
    end_s: float

    def positions(self) -> range:
        """Where the reply's tokens are in the conversation."""
        return range(self.offset, self.offset + len(self.turn.token_ids))

    def stamps(self) -> list[int | None]:
        """Policy version of each token, None where no span covers it."""
        stamps: list[int | None] = [None] * len(self.turn.token_ids)
        for version, start, end in self.turn.versions:
            stamps[start:end] = [version] * (end - start)
        return stamps

    def segments(self) -> list[tuple[str, str, int, int]]:
        """(replica, kind, start, end): every segment after the first is `continued`."""
        return [
            (replica, CONTINUED if index else kind, start, end)
            for index, (replica, kind, start, end) in enumerate(self.turn.segments)
        ]

    def kinds(self) -> list[str]:
        """Kind of the segment that each token came from."""
        kinds = ["unknown"] * len(self.turn.token_ids)
        for _, kind, start, end in self.segments():
            kinds[start:end] = [kind] * (end - start)
        return kinds


@dataclass(slots=True)
class Trajectory:
    """One episode of a group; `batch` is the update it belongs to. Times are monotonic seconds."""

    name: str
    group: int
    batch: int
    start_s: float
    end_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    turns: list[TakenTurn] = field(default_factory=list)
    reward: float = 0.0
    lost: bool = False

    def positions(self) -> list[int]:
        """Where sampled tokens are in `tokens`, rising."""
        return [at for taken in self.turns for at in taken.positions()]

    def logprobs(self) -> list[float]:
        """The engine's log-probability of each sampled token."""
        return [value for taken in self.turns for value in taken.turn.logprobs]

    def stamps(self) -> list[int | None]:
        """Policy version of each sampled token."""
        return [stamp for taken in self.turns for stamp in taken.stamps()]

    def versions(self) -> list[int]:
        """Policy versions that sampled it, rising."""
        return sorted({version for taken in self.turns for version, _, _ in taken.turn.versions})

    def revoked_mid_turn(self) -> bool:
        """Whether a turn moved to another replica after it had begun."""
        return any(len(taken.turn.segments) > 1 for taken in self.turns)
