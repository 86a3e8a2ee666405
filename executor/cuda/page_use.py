"""Which pages the granules of a KV cache lie on, and which of them nobody needs."""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from executor.granules import Granules
from executor.host_pages import Extent
from executor.resident import coalesce

Numbers = npt.NDArray[np.int64]


class PageUse:
    """Counts, for each page, the mapped granules that have a byte on it; all are mapped at first.

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
        """How many of them no mapped granule needs: what it takes to map this one."""
        return int((self._needed[self._pages[granule]] == 0).sum())

    @property
    def granules(self) -> int:
        """How many granules there are."""
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
