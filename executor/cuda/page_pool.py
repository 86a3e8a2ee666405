"""Where physical pages of a GPU come from, and where they go."""

from collections.abc import Collection
from typing import Protocol

from executor.cuda.driver import Driver, Handle
from executor.errors import DeviceMemoryShort


class PageSource(Protocol):
    """Whoever has pages to give; a page taken is nobody else's until it is given."""

    @property
    def idle(self) -> int:
        """Pages that this process has and nothing is mapped on: kept, not returned."""
        ...

    def take(self, count: int) -> list[Handle]:
        """Return that many pages, what is in them undefined, or raise DeviceMemoryShort."""
        ...

    def give(self, handles: Collection[Handle]) -> None:
        """Take pages back that nothing of this process is mapped on any more."""
        ...


class PagePool:
    """PageSource that asks the driver. Creating a page costs a hundred times what mapping one does,
    so up to `most_spare` are kept; only what is not kept is returned to the device."""

    def __init__(
        self, driver: Driver, page_bytes: int, *, most_spare: int = 0, headroom_bytes: int = 0
    ) -> None:
        """`headroom_bytes` of the device's memory stay free, whatever is asked for."""
        self._driver = driver
        self._page_bytes = page_bytes
        self._most_spare = most_spare
        self._headroom_bytes = headroom_bytes
        self._spare: list[Handle] = []

    @property
    def idle(self) -> int:
        """Pages kept."""
        return len(self._spare)

    def take(self, count: int) -> list[Handle]:
        """Return kept pages, then new ones; on DeviceMemoryShort everything is as it was."""
        kept = min(count, len(self._spare))
        created = self._create(count - kept)
        taken = self._spare[len(self._spare) - kept :]
        del self._spare[len(self._spare) - kept :]
        return taken + created

    def give(self, handles: Collection[Handle]) -> None:
        """Keep what fits, release the rest."""
        self._spare += handles
        self._release_down_to(self._most_spare)

    def trim(self) -> int:
        """Release all that is kept; return by how many bytes the device's free memory grew.

        That is measured, so it also has in it what others did meanwhile.
        """
        before = self._driver.free_bytes()
        self._release_down_to(0)
        return self._driver.free_bytes() - before

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
