"""A guest without an engine, for tests of its guard: its lease lasts until a test ends it."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class LeasedGuest:
    """Keeps what its guard asked of it; `lease` is asked for the lease's epoch."""

    name: str = "g"
    lease: Callable[[], int | None] = lambda: 1
    warming: bool = False
    asked: list[object] = field(default_factory=list)
    on_broken: Callable[[], object] = lambda: None

    def lease_epoch(self) -> int | None:
        return self.lease()

    def boost(self, *, on: bool) -> None:
        self.asked.append(on)

    def overdue(self, owed_bytes: int) -> None:
        self.asked.append(owed_bytes)

    def stalled(self, reason: str) -> None:
        self.asked.append(reason)

    def guard_broke(self) -> None:
        self.on_broken()
