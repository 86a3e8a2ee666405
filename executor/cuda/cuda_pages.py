"""KV memory on a GPU: pages go back to where they came from, and are zeroed when they return."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final

from executor.cuda.mapping import Mapping
from executor.cuda.page_pool import PageSource
from executor.cuda.page_use import PageUse
from executor.errors import DeviceError, DeviceMemoryShort, MappingLost

# Granules that a cache which begins empty maps in one piece.
AT_ONCE: Final = 256


class CudaPages:
    """PageBackend over a mapping. Each call does all that it is asked for, or nothing.

    A page goes when no mapped granule has a byte on it. Bytes are counted as returned when their
    page was given away; pages that the source keeps are not, nor are those that it borrowed and
    nothing is mapped on.
    """

    always_restores = False

    def __init__(
        self,
        mapping: Mapping,
        source: PageSource,
        use: PageUse,
        bytes_total: int,
        *,
        empty: bool = False,
    ) -> None:
        """`empty`: no page is mapped yet; as many granules as the source has pages for come now.

        Raises DeviceMemoryShort when not even one does.
        """
        self._mapping = mapping
        self._source = source
        self._use = use
        self._held: set[int] = set()
        self._away = 0
        self.bytes_total = bytes_total
        if empty:
            self._begin_empty()

    @property
    def released(self) -> Collection[int]:
        """Granules on the alias page."""
        return self._held

    @property
    def kept(self) -> int:
        """Granules' worth of pages in the source."""
        return -(-self._source.idle // self._use.most_pages)

    @property
    def owed(self) -> int:
        """Granules to release for what the source's lender wants back."""
        return -(-self._source.wanted // self._use.most_pages)

    def borrowed(self, granule: int) -> bool:
        """Whether any of a granule's pages is a lender's."""
        foreign = self._source.foreign
        if not foreign:
            return False
        return any(self._mapping.behind(page) in foreign for page in self._use.pages_of(granule))

    def ready(self, granules: Sequence[int]) -> int:
        """How many of these, from the first on, the source has pages for."""
        left = self._source.available
        for count, granule in enumerate(granules):
            left -= self._use.lacking(granule)
            if left < 0:
                return count
        return len(granules)

    def recall(self, granules: int) -> None:
        """Have the source ask for the pages of so many granules."""
        self._source.recall(granules * self._use.most_pages)

    def poll(self) -> bool:
        """Let the source hear its lender or its borrowers."""
        return self._source.step()

    @property
    def bytes_returned(self) -> int:
        """Bytes whose pages this process has no more."""
        away = max(0, self._away - self._source.idle)
        return min(self.bytes_total, away * self._mapping.page_bytes)

    def release(self, granules: Collection[int]) -> None:
        """Put the alias page under these granules. Raises DeviceError, and changed nothing then."""
        due = [granule for granule in granules if granule not in self._held]
        pages = self._use.take(due)
        try:
            gone = self._mapping.back(pages, [self._mapping.alias] * len(pages))
        except DeviceError:
            self._use.give(due)
            raise
        self._held.update(due)
        self._away += len(pages)
        self._source.give(gone)

    def restore(self, granules: Collection[int]) -> None:
        """Put zeroed pages under these granules.

        Raises DeviceMemoryShort while there are too few, or DeviceError; nothing changed then.
        """
        due = [granule for granule in granules if granule in self._held]
        pages = self._use.give(due)
        try:
            self._fetch(pages)
        except DeviceError:
            self._use.take(due)
            raise
        self._held.difference_update(due)
        self._away -= len(pages)

    def _begin_empty(self) -> None:
        every = range(self._use.granules)
        self._away += len(self._use.take(every))
        self._held.update(every)
        # Granule 0 has vLLM's null block: without it there is no engine.
        self.restore([0])
        with suppress(DeviceMemoryShort):
            for first in range(1, len(every), AT_ONCE):
                some = every[first : first + AT_ONCE]
                ready = self.ready(some)
                self.restore(some[:ready])
                if ready < len(some):
                    return

    def _fetch(self, pages: list[int]) -> None:
        handles = self._source.take(len(pages))
        try:
            self._mapping.back_zeroed(pages, handles)
        except MappingLost:
            raise  # Somebody may still write to these pages: nobody else is to have them.
        except DeviceError:
            self._source.give(handles)
            raise
