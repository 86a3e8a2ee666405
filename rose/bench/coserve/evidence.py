"""What an arm of a cell did, as the rules that judge it get it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rose.bench.coserve.harvested import BlockPair, Harvest
from rose.bench.coserve.pairs import Window
from rose.bench.coserve.plan import Arm
from rose.load.protocol import Request
from rose.stats import Estimate
from slo import SloSpec

Ratios = dict[tuple[str, int], Estimate | None]
PERCENTS = (90, 99)


@dataclass(frozen=True, slots=True)
class Group:
    """The blocks of one arm, each with the block alone that had the same arrivals."""

    arm: Arm
    busy_target: float
    traffic: str
    pairs: list[BlockPair]

    @property
    def seconds(self) -> float:
        """Wall time of the arm."""
        return sum(arm.duration_s for arm, _ in self.pairs)


@dataclass(frozen=True, slots=True)
class Evidence:
    """windows: arrivals of the arm beside the same ones alone. requests: all of the arm.

    guest: figures of its steps and yields, as the row has them. ratios: host latency in the arm
    over that alone, by metric and percentile. stops: seconds from a host's arrival to the end of
    the guest's last step, by window. caused_preemptions: the host's beyond those alone.
    """

    group: Group
    windows: Sequence[Window]
    requests: Sequence[Request]
    harvest: Harvest
    guest: dict[str, Any]
    ratios: Ratios
    spec: SloSpec
    seed: int
    stops: Sequence[Sequence[float]]
    caused_preemptions: int


def mismatches(windows: Sequence[Window]) -> int:
    """Answers that differ from those alone."""
    return sum(pair.mismatch for window in windows for pair in window)
