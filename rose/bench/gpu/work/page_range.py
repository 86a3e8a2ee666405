"""A range of addresses of one process, and the physical pages under it."""

from collections.abc import Sequence

from executor.cuda.driver import Driver, Handle

Handles = list[Handle]


class PageRange:
    """`pages` pages of the driver's own size, numbered from the range's start."""

    def __init__(self, driver: Driver, pages: int) -> None:
        self._driver = driver
        self.pages = pages
        self.page_bytes = driver.granularity
        self._base = driver.reserve(pages * self.page_bytes)

    def create(self) -> Handle:
        """Take a page from the card."""
        return self._driver.create(self.page_bytes)

    def release(self, handle: Handle) -> None:
        """Give a page back to the card, once nothing is mapped on it."""
        self._driver.release(handle)

    def map(self, page: int, handle: Handle) -> None:
        """Put a page under an address."""
        self._driver.map(self._address(page), self.page_bytes, handle)

    def unmap(self, page: int) -> None:
        """Take it away."""
        self._driver.unmap(self._address(page), self.page_bytes)

    def allow(self, first: int, pages: int) -> None:
        """Let the card use a run of mapped pages."""
        self._driver.set_access(self._address(first), pages * self.page_bytes)

    def zero(self, first: int, pages: int) -> None:
        """Overwrite a run of them: nobody sees what another process left there. Waits for it."""
        self._driver.fill(self._address(first), 0, pages * self.page_bytes)
        self._driver.synchronize()

    def create_all(self) -> Handles:
        """A page for each address."""
        return [self.create() for _ in range(self.pages)]

    def map_all(self, handles: Sequence[Handle]) -> None:
        """Put zeroed pages under all of it, ready for use."""
        for page, handle in enumerate(handles):
            self.map(page, handle)
        self.allow(0, self.pages)
        self.zero(0, self.pages)

    def unmap_all(self) -> None:
        """Take all away."""
        for page in range(self.pages):
            self.unmap(page)

    def release_all(self, handles: Sequence[Handle]) -> None:
        """Give them back to the card."""
        for handle in handles:
            self.release(handle)

    def close(self) -> None:
        """Give the addresses back; nothing may be mapped."""
        self._driver.unreserve(self._base, self.pages * self.page_bytes)

    def _address(self, page: int) -> int:
        return self._base + page * self.page_bytes
