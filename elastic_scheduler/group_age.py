"""How old the tokens of a group are: those that came, and those of turns that still run.

A turn that was sent and has not answered is presumed to be sampled by some version, most likely the
newest one at that time; its first stamp replaces the presumption.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Turn:
    sample: int
    oldest: int
    stamped: bool = False


class GroupAge:
    """The oldest policy version behind one group's tokens."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}
        self._came: dict[int, int] = {}
        self._begun = 0

    @property
    def oldest(self) -> int | None:
        """None while no turn was sent."""
        running = [turn.oldest for turn in self._turns.values()]
        return min([*running, *self._came.values()], default=None)

    def begin_turn(self, sample: int, presumed: int) -> int:
        """A turn of a sample is sent; returns its number."""
        self._begun += 1
        self._turns[self._begun] = _Turn(sample, presumed)
        return self._begun

    def stamp(self, turn: int, version: int) -> None:
        """Tokens of `version` came in a running turn."""
        row = self._turns[turn]
        row.oldest = min(row.oldest, version) if row.stamped else version
        row.stamped = True

    def end_turn(self, turn: int) -> None:
        """A turn is over, with or without tokens; of one that was forgotten nothing is left."""
        row = self._turns.pop(turn, None)
        if row is not None and row.stamped:
            self._came[row.sample] = min(row.oldest, self._came.get(row.sample, row.oldest))

    def forget(self, sample: int) -> None:
        """What came for a sample is void: it is tried anew."""
        self._came.pop(sample, None)
        for number in [number for number, row in self._turns.items() if row.sample == sample]:
            del self._turns[number]
