"""Device memory as a tensor of torch, without a copy: through `__cuda_array_interface__`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from executor.cuda.reservation import Reservation
from executor.host_pages import Extent

if TYPE_CHECKING:
    import torch

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
        """Writable; nothing is pending on them on any stream."""
        return CudaArrayInterface(
            shape=self.shape,
            strides=self.strides,
            typestr=_BYTES,
            data=(self.address, False),
            stream=None,
            version=_VERSION,
        )


def whole(reservation: Reservation) -> DeviceBytes:
    """All of it, `[size]`: what an engine views as its KV cache."""
    return DeviceBytes(reservation.address, (reservation.size,), None, reservation)


def layer(reservation: Reservation, extent: Extent, blocks: int) -> DeviceBytes:
    """One layer's part of the first blocks, `[blocks, block_bytes]`.

    Raises ValueError for blocks that lie outside of the reservation.
    """
    end = extent.base + (blocks - 1) * extent.stride + extent.block_bytes
    if extent.base < reservation.address or end > reservation.address + reservation.size:
        raise ValueError(f"{blocks} blocks from {extent.base:#x} to {end:#x} are not KV memory")
    shape = (blocks, extent.block_bytes)
    return DeviceBytes(extent.base, shape, (extent.stride, 1), reservation)


def as_tensor(memory: DeviceBytes, device: torch.device) -> torch.Tensor:
    """An int8 tensor over the memory, on the device that it is on."""
    import torch

    return torch.as_tensor(memory, device=device)
