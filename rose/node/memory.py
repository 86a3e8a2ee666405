"""What a guest holds, as whoever hands the memory out counts it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from rose.group_memory import group_bytes

KERNEL = "kernel"
PATIENCE_S = 0.25


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


class Measuring:
    """Asks a gauge from an event loop, and waits no longer than `patience_s`: a kernel or driver
    that hangs is one that does not know."""

    def __init__(self, gauge: MemoryGauge, patience_s: float = PATIENCE_S) -> None:
        self._gauge = gauge
        self._patience_s = patience_s
        self._asked: asyncio.Task[int | None] | None = None

    async def held_bytes(self) -> int | None:
        """The gauge's figure, None while it does not come. One question at a time."""
        if self._asked is None:
            self._asked = asyncio.create_task(asyncio.to_thread(self._gauge.held_bytes))
        done, _ = await asyncio.wait((self._asked,), timeout=self._patience_s)
        if not done:
            return None
        answered, self._asked = self._asked, None
        return answered.result()

    def end(self) -> None:
        """Wait for nothing any more."""
        if self._asked is not None:
            self._asked.cancel()


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
