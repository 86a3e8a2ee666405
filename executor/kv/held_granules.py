"""Granules that an engine's KV block pool gave up, and the time when their pages may go.

    mapped ── take ──> held, touchable ── unmap ──> held     once no step in flight can touch them
    held ── give_back ──> mapped                             pages first, then blocks

An engine's own pool knows the free blocks of a granule, and removes blocks from its lists.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection

from executor.kv.backing import PageBackend
from executor.kv.shrink_plan import Granules


class HeldGranules(ABC):
    """Part of a ballooned pool that every engine has; `fence` counts engine steps."""

    def __init__(self, granules: Granules, pages: PageBackend) -> None:
        """Hold the granules without pages from the start: call it when `_take_out` works."""
        self.granules = granules
        self.pages = pages
        self.held: set[int] = set()
        self._touchable: dict[int, int] = {}
        self._take_out(pages.released)
        self.held.update(pages.released)

    @property
    def granule_bytes(self) -> int:
        """KV bytes of a whole granule."""
        return self.pages.bytes_total // self.granules.blocks * self.granules.granule_blocks

    @property
    def unmapped(self) -> bool:
        """True if the pages of all held granules were returned."""
        return not self._touchable

    @property
    def owed(self) -> int:
        """Borrowed granules that the owner wants back, less those being returned."""
        owed = self.pages.owed
        return owed and max(0, owed - sum(map(self.pages.borrowed, self._touchable)))

    def take(self, granules: Collection[int], fence: int) -> int:
        """Hold those of the granules that are wholly free; return their number.

        Their pages stay until `unmap` is told that step `fence` is done: it may read or write them.
        """
        taken = self._wholly_free(granules)
        self._take_out(taken)
        for granule in taken:
            self.held.add(granule)
            self._touchable[granule] = fence
        return len(taken)

    def unmap(self, steps_done: int) -> None:
        """Return the pages that no step after the first `steps_done` can touch any more."""
        due = [granule for granule, fence in self._touchable.items() if fence <= steps_done]
        if due:
            self.pages.release(due)
            for granule in due:
                del self._touchable[granule]

    def give_back(self, granules: Collection[int]) -> None:
        """Map held granules again: first their pages, then their blocks."""
        self.pages.restore(granules)
        self._put_in(granules)
        for granule in granules:
            self.held.remove(granule)
            self._touchable.pop(granule, None)

    @abstractmethod
    def _wholly_free(self, granules: Collection[int]) -> list[int]:
        """Return those of the granules that are mapped and whose blocks are all free."""

    @abstractmethod
    def _take_out(self, granules: Collection[int]) -> None:
        """Take the free blocks of granules out of the pool."""

    @abstractmethod
    def _put_in(self, granules: Collection[int]) -> None:
        """Put the blocks of granules back into the pool."""
