"""Pool of a GPU's physical pages, and the use counts that say which of them can be released.

`PagePool` creates pages through the driver and keeps some spare. `PageRefcounts` maps the granules
of a KV cache to the pages they lie on, and knows which pages no mapped granule needs.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from executor.cuda.driver import Driver, Handle
from executor.errors import DeviceMemoryShort
from executor.kv.backing import Extent, coalesce
from executor.kv.shrink_plan import Granules


class PageSource(Protocol):
    """Source of physical pages; a page taken belongs to its taker alone until it is given back."""

    @property
    def idle(self) -> int:
        """Pages of this process without a mapping: kept, not returned."""
        ...

    @property
    def available(self) -> int:
        """Pages that `take` would return now."""
        ...

    @property
    def wanted(self) -> int:
        """Number of borrowed pages that their owner wants back; give as many."""
        ...

    @property
    def foreign(self) -> Collection[Handle]:
        """Pages that this process has and that belong to another one."""
        ...

    def take(self, count: int) -> list[Handle]:
        """Return that many pages, their content undefined. Raises DeviceMemoryShort."""
        ...

    def give(self, handles: Collection[Handle]) -> None:
        """Take pages back that this process has unmapped."""
        ...

    def recall(self, count: int) -> None:
        """Have this many pages in stock as soon as others have returned them; 0 ends that."""
        ...

    def step(self) -> bool:
        """Read the messages of sharing processes; never waits. Returns True with more to lend.

        Raises LoanError or DeviceError.
        """
        ...

    def close(self) -> None:
        """Release everything that is not mapped, and disconnect."""
        ...


class PagePool:
    """PageSource that asks the driver.

    Creating a page costs a hundred times as much as mapping one, so up to `most_spare` are kept;
    only further pages return to the device.

    With others it shares through the driver alone: pages that it returns they can create, and the
    other way round, unless another process on the device is faster.
    """

    wanted = 0
    foreign: Collection[Handle] = ()

    def __init__(
        self, driver: Driver, page_bytes: int, *, most_spare: int = 0, headroom_bytes: int = 0
    ) -> None:
        """headroom_bytes: of the device's memory, which stay free in any case."""
        self._driver = driver
        self._page_bytes = page_bytes
        self._most_spare = most_spare
        self._headroom_bytes = headroom_bytes
        self._spare: list[Handle] = []

    @property
    def idle(self) -> int:
        """Pages kept."""
        return len(self._spare)

    @property
    def available(self) -> int:
        """Pages kept, and the device's free memory beyond the headroom."""
        free = self._driver.free_bytes() - self._headroom_bytes
        return len(self._spare) + max(0, free // self._page_bytes)

    def recall(self, count: int) -> None:
        """Do nothing: others are asked on the control page."""

    def step(self) -> bool:
        """Do nothing: there are no messages."""
        return False

    def close(self) -> None:
        """Release all kept pages."""
        self._release_down_to(0)

    def take(self, count: int) -> list[Handle]:
        """Return kept pages, then new ones; on DeviceMemoryShort nothing changed."""
        kept = min(count, len(self._spare))
        created = self._create(count - kept)
        taken = self._spare[len(self._spare) - kept :]
        del self._spare[len(self._spare) - kept :]
        return taken + created

    def give(self, handles: Collection[Handle]) -> None:
        """Keep what fits, release the rest."""
        self._spare += handles
        self._release_down_to(self._most_spare)

    def _release_down_to(self, spare: int) -> None:
        while len(self._spare) > spare:
            self._driver.release(self._spare[-1])
            self._spare.pop()

    def _create(self, count: int) -> list[Handle]:
        if not count:
            return []
        wanted = count * self._page_bytes
        free = self._driver.free_bytes()
        if free - wanted < self._headroom_bytes:
            raise DeviceMemoryShort(
                f"{wanted} bytes of KV pages wanted, {free} free on the GPU, of which"
                f" {self._headroom_bytes} stay free; it may come back"
            )
        created: list[Handle] = []
        try:
            for _ in range(count):
                created.append(self._driver.create(self._page_bytes))
        except BaseException:
            for handle in created:
                self._driver.release(handle)
            raise
        return created


Numbers = npt.NDArray[np.int64]


class PageRefcounts:
    """Counts, for each page, of the mapped granules with a byte on it; all are mapped at first.

    A page without a byte of any block counts as needed.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        granules: Granules,
        base: int,
        page_bytes: int,
        pages: int,
    ) -> None:
        self._extents = extents
        self._granules = granules
        self._base = base
        self._page_bytes = page_bytes
        self._needed: Numbers = np.zeros(pages, np.int64)
        self._pages = [self._find_pages(granule) for granule in range(granules.count)]
        for found in self._pages:
            self._needed[found] += 1
        self._needed[self._needed == 0] = 1

    def take(self, granules: Collection[int]) -> list[int]:
        """Count these granules out; return the pages that no other one needs, ascending."""
        touched = self._add(granules, -1)
        freed: list[int] = touched[self._needed[touched] == 0].tolist()
        return freed

    def give(self, granules: Collection[int]) -> list[int]:
        """Count these granules in again; return the pages that none needed before, ascending."""
        touched = self._touched(granules)
        lacking = touched[self._needed[touched] == 0]
        self._add(granules, 1)
        found: list[int] = lacking.tolist()
        return found

    def pages_of(self, granule: int) -> list[int]:
        """The pages on which a granule has a byte, ascending."""
        found: list[int] = self._pages[granule].tolist()
        return found

    def lacking(self, granule: int) -> int:
        """Return how many of its pages no mapped granule needs: the cost of mapping this one."""
        return int((self._needed[self._pages[granule]] == 0).sum())

    @property
    def granules(self) -> int:
        """Number of granules."""
        return len(self._pages)

    @property
    def most_pages(self) -> int:
        """Pages of the granule that has the most."""
        return max(len(found) for found in self._pages)

    def _add(self, granules: Collection[int], change: int) -> Numbers:
        for granule in granules:
            self._needed[self._pages[granule]] += change
        return self._touched(granules)

    def _touched(self, granules: Collection[int]) -> Numbers:
        parts = [self._pages[granule] for granule in granules]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)

    def _find_pages(self, granule: int) -> Numbers:
        blocks = self._granules.blocks_of(granule)
        pieces = coalesce(piece for extent in self._extents for piece in extent.ranges(blocks))
        size = self._page_bytes
        return np.unique(
            np.concatenate(
                [
                    np.arange((p.start - self._base) // size, -((self._base - p.end) // size))
                    for p in pieces
                ]
            )
        )
