"""The load of one cell: so many streams, each one turn after the other."""

from dataclasses import asdict, dataclass

STREAMS = (1, 10, 100, 500, 1000, 2000)
# From this many streams on each goes at its full pace; fewer go faster, or there were few turns.
PACED_STREAMS = 200


@dataclass(frozen=True, slots=True)
class Load:
    """A turn has `chunks` chunks of `chunk_tokens` tokens, `gap_s` apart, the first after
    `first_s`; its prompt has `prompt_tokens`. Turns begin for `seconds`, after a ramp of one turn.
    """

    streams: int
    seconds: float = 8.0
    prompt_tokens: int = 128
    chunks: int = 16
    chunk_tokens: int = 8
    first_s: float = 0.02
    full_gap_s: float = 0.5

    @property
    def gap_s(self) -> float:
        """Seconds between a turn's chunks."""
        return self.full_gap_s * min(1.0, self.streams / PACED_STREAMS)

    @property
    def max_tokens(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def turn_s(self) -> float:
        """What a turn takes without any router."""
        return self.first_s + (self.chunks - 1) * self.gap_s

    def as_json(self) -> dict[str, object]:
        """For the record."""
        return {**asdict(self), "gap_s": self.gap_s, "turn_s": self.turn_s}
