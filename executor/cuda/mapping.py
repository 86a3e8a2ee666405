"""A run of addresses in which every page has memory at any time: its own, or the alias page.

One physical page backs all addresses that have none of their own. A kernel that reads one of them
by mistake gets the alias page's content and does not fault, which would end every process of an MPS
server. Only between `unmap` and `map` of one page nothing is behind it: no step that could touch
it may be in flight.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from executor.cuda.driver import Driver, Handle
from executor.errors import DeviceError, MappingLost
from executor.host_pages import runs

_NOTHING: Final = Handle(-1)


class Mapping:
    """`pages` pages of `page_bytes` from `base` on."""

    def __init__(
        self, driver: Driver, page_bytes: int, pages: int, own: Sequence[Handle] = ()
    ) -> None:
        """`own`: what is behind the first pages; the alias page is behind the others. All
        is zeroed.

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
        """Put these handles behind these pages, and return what was there.

        All or nothing: on DeviceError everything is mapped as it was, with its content; only
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
        """As `back`, and zeroed."""
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

        Raises DeviceError; MappingLost when it is not known to have ended, for then no page may be
        unmapped any more.
        """
        try:
            for run in runs(pages):
                self._driver.fill(self.address(run.start), 0, len(run) * self.page_bytes)
        finally:
            self._settle()

    def behind(self, page: int) -> Handle:
        """What is behind a page now."""
        return self._backing[page]

    def address(self, page: int) -> int:
        """Where a page begins."""
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
