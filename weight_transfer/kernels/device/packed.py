"""Changes as they travel to a device: one run of bytes for a part of a tensor's changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.device.bits import DeviceBits
from weight_transfer.kernels.exchange import Change

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 64 << 20
_ALIGNED = 16
_INT32_PLACES = 1 << 31


@dataclass(frozen=True, slots=True)
class Packed:
    """Changes `first` to `end` of the change number `row`: places, old and new values, in line."""

    row: int
    change: Change[DeviceBits]
    first: int
    end: int

    @property
    def count(self) -> int:
        """Changes in it."""
        return self.end - self.first

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the device."""
        return self._starts[-1]

    @property
    def host(self) -> NDArray[np.uint8]:
        """The bytes, made anew."""
        part = slice(self.first, self.end)
        change = self.change
        places = change.places[part].astype(_place_type(change.target))
        packed = np.zeros(self.nbytes, np.uint8)
        parts = places, change.old[part], change.new[part]
        for start, values in zip(self._starts[:3], parts, strict=True):
            packed[start : start + values.nbytes] = values.view(np.uint8)
        return packed

    def views(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(places, old, new) of the bytes once they are on the device."""
        import torch

        place = torch.int32 if _place_type(self.change.target).itemsize == 4 else torch.int64
        values = self.change.target.flat.dtype
        starts = self._starts
        return (
            packed[: self.count * place.itemsize].view(place),
            packed[starts[1] : starts[1] + self.count * values.itemsize].view(values),
            packed[starts[2] : starts[2] + self.count * values.itemsize].view(values),
        )

    @property
    def _starts(self) -> tuple[int, int, int, int]:
        """Where places, old and new begin, and the end."""
        places = _aligned(self.count * _place_type(self.change.target).itemsize)
        values = _aligned(self.count * self.change.target.itemsize)
        return 0, places, places + values, places + 2 * values


def pack(changes: list[Change[DeviceBits]]) -> Iterator[Packed]:
    """Cut changes into pieces of at most PIECE_BYTES; nothing is copied yet."""
    for row, change in enumerate(changes):
        each = _place_type(change.target).itemsize + 2 * change.target.itemsize
        most = PIECE_BYTES // each - _ALIGNED
        for first in range(0, change.places.size, most):
            yield Packed(row, change, first, min(first + most, change.places.size))


def _place_type(target: DeviceBits) -> np.dtype[np.signedinteger]:
    return np.dtype(np.int32 if target.size <= _INT32_PLACES else np.int64)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
