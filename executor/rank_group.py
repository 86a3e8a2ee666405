"""Group of an engine's ranks, over its CPU process group: agreement, and the gate of a start."""

from typing import Any, Final, Self

import torch.distributed

from executor.guest.gate_client import StartGate

# The other ranks hear of a start that waits at least this often: a collective of torch has a
# deadline.
GATE_NEWS_S: Final = 10.0


class RankGroup:
    """Ranks of one group of an engine, as one of them sees them.

    Each method is called by all ranks, in the same order. It raises RuntimeError when another rank
    ends.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, first: int = 0) -> None:  # noqa: ANN401 -- torch's
        """Take the group's process group on the CPU, of which `first` is the first global rank."""
        self.rank = rank
        self.size = size
        self._group = group
        self._first = first

    @classmethod
    def of(cls, group: Any) -> Self:  # noqa: ANN401 -- the engine's
        """Return the ranks of an engine's group, vLLM's or SGLang's GroupCoordinator."""
        ranks = group.ranks
        return cls(int(group.rank_in_group), len(ranks), group.cpu_group, int(ranks[0]))

    @property
    def follows(self) -> bool:
        """True on all ranks but the first."""
        return self.rank > 0

    def agree(self, value: Any = None) -> Any:  # noqa: ANN401 -- of any picklable type
        """Return the first rank's value."""
        if self.size == 1:
            return value
        said = [value]
        torch.distributed.broadcast_object_list(said, src=self._first, group=self._group)
        return said[0]

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 -- of any picklable type
        """Return the values of all ranks, by rank."""
        every: list[Any] = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(every, value, group=self._group)
        return every


def wait_together(start: StartGate, ranks: RankGroup) -> None:
    """Block all ranks until the gate of the start opens, which the first of them asks.

    So none of the others waits busily in a collective of the pass beside a busy host.
    """
    while not ranks.agree(ranks.follows or start.wait(GATE_NEWS_S)):
        pass
    start.passes += ranks.follows
