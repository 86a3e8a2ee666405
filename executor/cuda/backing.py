"""Backing of KV memory by GPU pages: a virtual-memory mapping whose every address is readable.

One physical page, the alias page, backs all addresses that have no page of their own. A kernel that
reads one of them by mistake gets the alias page's content instead of a fault, which would end every
process of an MPS server. Only between `unmap` and `map` of one page nothing is mapped there, so no
step that could touch it may be in flight.

`CudaPages` is the page backend over such a mapping. Released pages go back to their source, and
pages that return are zeroed first.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final

from executor.cuda.driver import Driver, Handle
from executor.cuda.page_pool import PageRefcounts, PageSource
from executor.errors import DeviceError, DeviceMemoryShort, MappingLost
from executor.kv.backing import runs

_NOTHING: Final = Handle(-1)


class VirtualMapping:
    """`pages` pages of `page_bytes` from `base` on."""

    def __init__(
        self, driver: Driver, page_bytes: int, pages: int, own: Sequence[Handle] = ()
    ) -> None:
        """own: handles behind the first pages; the alias page is behind the others. All is zeroed.

        Raises DeviceError, and leaves nothing behind then unless it is MappingLost.
        """
        if page_bytes <= 0 or page_bytes % driver.granularity:
            raise DeviceError(
                f"pages of {page_bytes} bytes do not fit this GPU: give a multiple of"
                f" {driver.granularity}"
            )
        self._driver = driver
        self.page_bytes = page_bytes
        self.pages = pages
        self.alias = driver.create(page_bytes)
        self._backing = [_NOTHING] * pages
        try:
            self.base = driver.reserve(pages * page_bytes)
        except DeviceError:
            driver.release(self.alias)
            raise
        try:
            self.back(range(pages), [*own, *[self.alias] * (pages - len(own))])
            self.zero(range(pages))
        except MappingLost:
            raise
        except DeviceError:
            self.close()
            raise

    def back(self, pages: Sequence[int], handles: Sequence[Handle]) -> list[Handle]:
        """Put these handles behind these pages, and return the earlier ones.

        All or nothing: on DeviceError everything is mapped as before, with its content; only
        MappingLost says that this failed, too.
        """
        before = [self._backing[page] for page in pages]
        begun: list[int] = []
        try:
            for page, handle in zip(pages, handles, strict=True):
                begun.append(page)
                self._replace(page, handle)
            self._allow(pages)
        except DeviceError as error:
            self._undo(begun, before, error)
            raise
        return before

    def back_zeroed(self, pages: Sequence[int], handles: Sequence[Handle]) -> list[Handle]:
        """Put these handles behind these pages as `back` does, and zero them."""
        before = self.back(pages, handles)
        try:
            self.zero(pages)
        except MappingLost:
            raise
        except DeviceError:
            self.back(pages, before)
            raise
        return before

    def zero(self, pages: Sequence[int]) -> None:
        """Write zeros over these pages, and wait for it.

        Raises DeviceError; MappingLost if it may not have ended, for then no page may be unmapped
        any more.
        """
        try:
            for run in runs(pages):
                self._driver.fill(self.address(run.start), 0, len(run) * self.page_bytes)
        finally:
            self._settle()

    def behind(self, page: int) -> Handle:
        """Return the handle behind a page now."""
        return self._backing[page]

    def address(self, page: int) -> int:
        """Return the address of a page."""
        return self.base + page * self.page_bytes

    def close(self) -> list[Handle]:
        """Unmap and unreserve everything; return the handles that are not the alias page's."""
        own = [handle for handle in self._backing if handle not in (self.alias, _NOTHING)]
        for page in range(self.pages):
            self._unmap(page)
        self._driver.unreserve(self.base, self.pages * self.page_bytes)
        self._driver.release(self.alias)
        return own

    def _settle(self) -> None:
        try:
            self._driver.synchronize()
        except DeviceError as error:
            raise MappingLost(
                f"{error}; KV pages may still be written to: start the engine anew"
            ) from error

    def _replace(self, page: int, handle: Handle) -> None:
        self._unmap(page)
        if handle != _NOTHING:
            self._driver.map(self.address(page), self.page_bytes, handle)
            self._backing[page] = handle

    def _unmap(self, page: int) -> None:
        # One mapping a call: the driver promises no more.
        if self._backing[page] != _NOTHING:
            self._driver.unmap(self.address(page), self.page_bytes)
            self._backing[page] = _NOTHING

    def _allow(self, pages: Iterable[int]) -> None:
        for run in runs(pages):
            self._driver.set_access(self.address(run.start), len(run) * self.page_bytes)

    def _undo(self, pages: Sequence[int], before: Sequence[Handle], error: DeviceError) -> None:
        try:
            for page, handle in zip(pages, before, strict=False):
                if self._backing[page] != handle:
                    self._replace(page, handle)
            self._allow(page for page in pages if self._backing[page] != _NOTHING)
        except DeviceError as second:
            raise MappingLost(
                f"{error}; putting the KV cache back failed as well ({second}): start the engine"
                " anew"
            ) from error


# Granules that an initially empty cache maps in one piece.
AT_ONCE: Final = 256


class CudaPages:
    """PageBackend over a mapping. Each call does all that it is asked for, or nothing.

    A page goes when no mapped granule has a byte on it. Bytes count as returned when their page was
    given away; pages that the source keeps do not, nor do borrowed ones without a mapping.
    """

    always_restores = False

    def __init__(
        self,
        mapping: VirtualMapping,
        source: PageSource,
        use: PageRefcounts,
        bytes_total: int,
        *,
        empty: bool = False,
    ) -> None:
        """empty: no page is mapped yet; as many granules as the source has pages for come now.

        Raises DeviceMemoryShort if not even one does.
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
        """Granules to release for the pages that the source's lender wants back."""
        return -(-self._source.wanted // self._use.most_pages)

    def borrowed(self, granule: int) -> bool:
        """Return True if any of a granule's pages is a lender's."""
        foreign = self._source.foreign
        if not foreign:
            return False
        return any(self._mapping.behind(page) in foreign for page in self._use.pages_of(granule))

    def ready(self, granules: Sequence[int]) -> int:
        """Return how many of these, from the first on, the source has pages for."""
        left = self._source.available
        for count, granule in enumerate(granules):
            left -= self._use.lacking(granule)
            if left < 0:
                return count
        return len(granules)

    def recall(self, granules: int) -> None:
        """Have the source ask for the pages of this many granules."""
        self._source.recall(granules * self._use.most_pages)

    def poll(self) -> bool:
        """Let the source read the messages of its lender or its borrowers."""
        return self._source.step()

    @property
    def bytes_returned(self) -> int:
        """Bytes whose pages this process no longer has."""
        away = max(0, self._away - self._source.idle)
        return min(self.bytes_total, away * self._mapping.page_bytes)

    def release(self, granules: Collection[int]) -> None:
        """Put the alias page under these granules. On DeviceError nothing changed."""
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
        # Granule 0 has vLLM's null block, which an engine needs.
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
