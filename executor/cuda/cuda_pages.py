"""KV memory on a GPU: pages go back to where they came from, and are zeroed when they return."""

from collections.abc import Collection

from executor.cuda.mapping import Mapping
from executor.cuda.page_pool import PageSource
from executor.cuda.page_use import PageUse
from executor.errors import DeviceError, MappingLost


class CudaPages:
    """PageBackend over a mapping. Each call does all that it is asked for, or nothing.

    A page goes when no mapped granule has a byte on it. Bytes are counted as returned when their
    page was given away; pages that the source keeps are not.
    """

    always_restores = False

    def __init__(
        self,
        mapping: Mapping,
        source: PageSource,
        use: PageUse,
        bytes_total: int,
    ) -> None:
        self._mapping = mapping
        self._source = source
        self._use = use
        self._held: set[int] = set()
        self._away = 0
        self.bytes_total = bytes_total

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

    def _fetch(self, pages: list[int]) -> None:
        handles = self._source.take(len(pages))
        try:
            self._mapping.back_zeroed(pages, handles)
        except MappingLost:
            raise  # Somebody may still write to these pages: nobody else is to have them.
        except DeviceError:
            self._source.give(handles)
            raise
