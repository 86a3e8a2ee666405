"""KV memory of this engine that ROSE reserved, and how its address leads back to it.

Whoever allocates the KV cache makes one reservation; whoever balloons it finds it by the address
of the tensor. Both are in one process: pages are mapped nowhere else.
"""

from collections.abc import Sequence
from typing import Final

from executor.cuda.cuda_pages import CudaPages
from executor.cuda.driver import Driver
from executor.cuda.mapping import Mapping
from executor.cuda.page_pool import PagePool
from executor.cuda.page_use import PageUse
from executor.errors import DeviceError, MappingLost
from executor.granules import Granules
from executor.host_pages import Extent

_reservations: Final[dict[int, "Reservation"]] = {}


class Reservation:
    """`size` bytes of KV memory from `address` on, all on zeroed pages at first."""

    def __init__(
        self, driver: Driver, size: int, *, headroom_bytes: int = 0, most_spare: int = 0
    ) -> None:
        """For `headroom_bytes` and `most_spare`, see PagePool. Raises DeviceError."""
        if size <= 0:
            raise DeviceError(f"a KV cache of {size} bytes; give the engine more GPU memory")
        self.size = size
        self.page_bytes = driver.granularity
        pages = -(-size // self.page_bytes)
        self._pool = PagePool(
            driver, self.page_bytes, most_spare=most_spare, headroom_bytes=headroom_bytes
        )
        own = self._pool.take(pages)
        try:
            self._mapping = Mapping(driver, self.page_bytes, pages, own)
        except MappingLost:
            raise
        except DeviceError:
            self._pool.give(own)
            self._pool.trim()
            raise
        self.address = self._mapping.base
        _reservations[self.address] = self

    def backend(self, extents: Sequence[Extent], granules: Granules) -> CudaPages:
        """The pages of KV blocks that lie at `extents` in it, for one balloon."""
        mapping = self._mapping
        use = PageUse(extents, granules, mapping.base, mapping.page_bytes, mapping.pages)
        return CudaPages(mapping, self._pool, use, self.size)

    def close(self) -> None:
        """Give everything back to the device. No tensor over it may be used any more."""
        del _reservations[self.address]
        self._pool.give(self._mapping.close())
        self._pool.trim()


def reservation_at(address: int) -> Reservation | None:
    """The reservation of this process that begins there."""
    return _reservations.get(address)
