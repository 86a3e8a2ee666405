"""KV memory that ROSE reserved in this engine, found by its address, and seen as a torch tensor.

The KV cache's allocator makes one reservation; the KV balloon finds it by the tensor's address.
Both are in one process: pages are mapped in no other one. The memory becomes a tensor without a
copy, through `__cuda_array_interface__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict

from executor.cuda.backing import CudaPages, VirtualMapping
from executor.cuda.driver import Driver
from executor.cuda.page_pool import PagePool, PageRefcounts, PageSource
from executor.errors import DeviceError, MappingLost
from executor.kv.backing import Extent
from executor.kv.shrink_plan import Granules

if TYPE_CHECKING:
    import torch


_reservations: Final[dict[int, Reservation]] = {}


class Reservation:
    """`size` bytes of KV memory from `address` on, all of it readable at any time, and zeroed.

    mapping: of these addresses to pages. source: of the pages.
    """

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
        """source: of pages, closed with this; by default a PagePool of the other two arguments.

        partly: if memory is short, begin without any page: `backend` maps the available ones. Only
        an engine that balloons the memory may use it then. Raises DeviceError.
        """
        if size <= 0:
            raise DeviceError(f"a KV cache of {size} bytes; give the engine more GPU memory")
        self.size = size
        self.page_bytes = driver.granularity
        pages = -(-size // self.page_bytes)
        self.source = source or PagePool(
            driver, self.page_bytes, most_spare=most_spare, headroom_bytes=headroom_bytes
        )
        self._empty = partly and self.source.available < pages
        own = [] if self._empty else self.source.take(pages)
        try:
            self.mapping = VirtualMapping(driver, self.page_bytes, pages, own)
        except MappingLost:
            raise
        except DeviceError:
            self.source.give(own)
            self.source.close()
            raise
        self.address = self.mapping.base
        _reservations[self.address] = self

    def backend(self, extents: Sequence[Extent], granules: Granules) -> CudaPages:
        """Return the pages of KV blocks that lie at `extents` in it, for one balloon.

        Raises DeviceMemoryShort if a reservation that began empty gets no granule.
        """
        mapping = self.mapping
        use = PageRefcounts(extents, granules, mapping.base, mapping.page_bytes, mapping.pages)
        return CudaPages(mapping, self.source, use, self.size, empty=self._empty)

    def close(self) -> None:
        """Return everything to the device. No tensor over it may be used any more."""
        del _reservations[self.address]
        self.source.give(self.mapping.close())
        self.source.close()


def reservation_at(address: int) -> Reservation | None:
    """Return this process's reservation that begins there."""
    return _reservations.get(address)


_BYTES = "|i1"
_VERSION = 3


class CudaArrayInterface(TypedDict):
    """Version 3 of the interface; `strides` are bytes, None for a contiguous array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    typestr: str
    data: tuple[int, bool]
    stream: int | None
    version: int


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Signed bytes at an address of the device; `owner` lives as long as a tensor over them."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    owner: Reservation

    @property
    def __cuda_array_interface__(self) -> CudaArrayInterface:
        """Writable; no stream has pending work on them."""
        return CudaArrayInterface(
            shape=self.shape,
            strides=self.strides,
            typestr=_BYTES,
            data=(self.address, False),
            stream=None,
            version=_VERSION,
        )


def whole(reservation: Reservation) -> DeviceBytes:
    """Return all of it, `[size]`: an engine's view of its KV cache."""
    return DeviceBytes(reservation.address, (reservation.size,), None, reservation)


def layer(reservation: Reservation, extent: Extent, blocks: int) -> DeviceBytes:
    """Return one layer's part of the first blocks, `[blocks, block_bytes]`.

    Raises ValueError for blocks that lie outside of the reservation.
    """
    end = extent.base + (blocks - 1) * extent.stride + extent.block_bytes
    if extent.base < reservation.address or end > reservation.address + reservation.size:
        raise ValueError(f"{blocks} blocks from {extent.base:#x} to {end:#x} are not KV memory")
    shape = (blocks, extent.block_bytes)
    return DeviceBytes(extent.base, shape, (extent.stride, 1), reservation)


def as_tensor(memory: DeviceBytes, device: torch.device) -> torch.Tensor:
    """Return an int8 tensor over the memory, on its device."""
    import torch

    return torch.as_tensor(memory, device=device)
