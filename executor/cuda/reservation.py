"""KV memory of this engine that ROSE reserved, and how its address leads back to it.

Whoever allocates the KV cache makes one reservation; whoever balloons it finds it by the address
of the tensor. Both are in one process: pages are mapped nowhere else.
"""

from collections.abc import Sequence
from typing import Final

from executor.cuda.cuda_pages import CudaPages
from executor.cuda.driver import Driver
from executor.cuda.mapping import Mapping
from executor.cuda.page_pool import PagePool, PageSource
from executor.cuda.page_use import PageUse
from executor.errors import DeviceError, MappingLost
from executor.granules import Granules
from executor.host_pages import Extent

_reservations: Final[dict[int, "Reservation"]] = {}


class Reservation:
    """`size` bytes of KV memory from `address` on, all of it readable at any time, and zeroed."""

    def __init__(
        self,
        driver: Driver,
        size: int,
        *,
        source: PageSource | None = None,
        partly: bool = False,
        headroom_bytes: int = 0,
        most_spare: int = 0,
    ) -> None:
        """`source`: where pages come from; it is closed with the reservation. Without one that is a
        PagePool with `headroom_bytes` and `most_spare`.

        `partly`: where memory is short, begin without any page: `backend` maps what there is. No
        engine may use the memory then that does not balloon it. Raises DeviceError.
        """
        if size <= 0:
            raise DeviceError(f"a KV cache of {size} bytes; give the engine more GPU memory")
        self.size = size
        self.page_bytes = driver.granularity
        pages = -(-size // self.page_bytes)
        self._source = source or PagePool(
            driver, self.page_bytes, most_spare=most_spare, headroom_bytes=headroom_bytes
        )
        self._empty = partly and self._source.available < pages
        own = [] if self._empty else self._source.take(pages)
        try:
            self._mapping = Mapping(driver, self.page_bytes, pages, own)
        except MappingLost:
            raise
        except DeviceError:
            self._source.give(own)
            self._source.close()
            raise
        self.address = self._mapping.base
        _reservations[self.address] = self

    def backend(self, extents: Sequence[Extent], granules: Granules) -> CudaPages:
        """The pages of KV blocks that lie at `extents` in it, for one balloon.

        Raises DeviceMemoryShort where a reservation that began empty gets no granule.
        """
        mapping = self._mapping
        use = PageUse(extents, granules, mapping.base, mapping.page_bytes, mapping.pages)
        return CudaPages(mapping, self._source, use, self.size, empty=self._empty)

    def close(self) -> None:
        """Give everything back to the device. No tensor over it may be used any more."""
        del _reservations[self.address]
        self._source.give(self._mapping.close())
        self._source.close()


def reservation_at(address: int) -> Reservation | None:
    """The reservation of this process that begins there."""
    return _reservations.get(address)
