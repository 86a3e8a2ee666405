"""One thing that is measured by itself, in a process of its own."""

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

    estimate_s: what it takes on a card of 2024. limit_s: when it is ended.
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
    lacking: Callable[[], str] = lambda: ""
    checks: Callable[[Mapping[str, Any]], list[Check]] = lambda measured: []

    def __post_init__(self) -> None:
        if not self.estimate_s <= self.limit_s <= MOST_S:
            raise ValueError(f"piece {self.name} is not below {MOST_S:.0f} s")

    def missing(self) -> str:
        """Why it cannot run in this environment, empty when it can."""
        if lacking := self.lacking():
            return lacking
        missing = absent(self.modules)
        return f"needs {', '.join(missing)}, which this Python does not have" if missing else ""
