"""One thing that is measured by itself, in a process of its own or of its group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rose.bench.gpu.limits import Check
from rose.bench.gpu.modules import absent
from rose.bench.gpu.sizes import Sizes

Measured = dict[str, Any]
# No command that runs on a lent machine may take longer.
MOST_S = 570.0


@dataclass(frozen=True, slots=True)
class Piece:
    """work: `module:function` of (Sizes, place) that measures; imported by the piece's process.

    group: `module:function` that measures several pieces in one process, because what they need
    takes long to start; empty for a piece by itself. `work` is a function of what it starts then.
    known_weights: of a group whose guest gets new weights: what it starts with takes a minute more
    to make.
    least: what a piece of a group takes at the least, once its group has started.
    estimate_s: what it takes on a card of 2024, alone. limit_s: when it is ended.
    memory: bytes of the card that it needs. modules: what must be importable.
    lacking: why it cannot run here, empty when it can.
    """

    name: str
    what: str
    work: str
    estimate_s: float
    limit_s: float
    memory: Callable[[Sizes], int]
    modules: tuple[str, ...] = ()
    group: str = ""
    known_weights: bool = False
    least: Callable[[Sizes], float] | None = None
    lacking: Callable[[], str] = lambda: ""
    checks: Callable[[Mapping[str, Any]], list[Check]] = lambda measured: []

    def __post_init__(self) -> None:
        if not self.estimate_s <= self.limit_s <= MOST_S:
            raise ValueError(f"piece {self.name} is not below {MOST_S:.0f} s")

    def least_s(self, sizes: Sizes) -> float:
        """What it takes at the least; in a group once that has started."""
        return self.estimate_s if self.least is None else self.least(sizes)

    def takes_s(self, sizes: Sizes) -> float:
        """What it is expected to take in a process of its own."""
        started_s = 0.0 if self.least is None else sizes.serving.start_s
        return started_s + self.least_s(sizes)

    def told(self, sizes: Sizes) -> dict[str, Any]:
        """The sizes that this piece depends on, as its record holds them."""
        return sizes.told(serving=bool(self.group))

    def missing(self) -> str:
        """Why it cannot run in this environment, empty when it can."""
        if lacking := self.lacking():
            return lacking
        missing = absent(self.modules)
        return f"needs {', '.join(missing)}, which this Python does not have" if missing else ""
