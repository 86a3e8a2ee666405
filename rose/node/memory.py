"""What a guest holds, as whoever hands the memory out counts it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from rose.group_memory import group_bytes

KERNEL = "kernel"


class MemoryGauge(Protocol):
    """Measures one guest for as long as one reclaim lasts. Its figures compare with each other."""

    @property
    def by(self) -> str:
        """Who measures; known after the first figure."""
        ...

    @property
    def sees_all(self) -> bool:
        """Whether weights are in the figure too; known after the first one."""
        ...

    def held_bytes(self) -> int | None:
        """None when unknown: then nothing counts as freed."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """One measurement: bytes, None when unknown, and by whom."""

    amount: int | None
    by: str

    @classmethod
    def now(cls, gauge: MemoryGauge) -> Self:
        """Ask a gauge once."""
        amount = gauge.held_bytes()
        return cls(amount, gauge.by)


class HostMemory:
    """MemoryGauge of a guest whose weights and KV are memory of this machine."""

    by = KERNEL
    sees_all = True

    def __init__(self, group: Callable[[], int | None]) -> None:
        """`group`: its process group, None while it has none."""
        self._group = group

    def held_bytes(self) -> int | None:
        """Proportional set size of its process group."""
        group = self._group()
        return 0 if group is None else group_bytes(group)
