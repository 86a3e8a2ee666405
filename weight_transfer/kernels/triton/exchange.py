"""Exchange of weights on a device: changes are staged there, as far as memory is granted for them.

resident   pieces that wait on the device; under the pause nothing of them is copied
streamed   pieces beyond that wait in pinned memory and pass one after the other through a slot

A piece is one run of bytes: places, old and new values of a part of a tensor's changes. `Order`
says which work runs beside the engine's steps, and which only after they have ended.
Under the pause nothing is allocated, and the host waits once, for the counts. Where the device has
no room, one error names the shortage, and nothing was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from weight_transfer.errors import DeviceMemoryError
from weight_transfer.kernels.backend import Change, Int64s, check_indices
from weight_transfer.kernels.triton import kernels
from weight_transfer.kernels.triton.device_bits import DeviceBits

if TYPE_CHECKING:
    import torch


@contextmanager
def named_shortage(device: torch.device, what: str) -> Iterator[None]:
    """Raise DeviceMemoryError, one line, where `what` finds no room; nothing is written then."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        shortage = str(error).splitlines()[0]
        release_unused(device)
        raise DeviceMemoryError(
            f"{device} has no room for {what}; nothing was written, free memory there and send it"
            f" again ({shortage})"
        ) from error


def release_unused(device: torch.device) -> None:
    """Give memory that nothing uses any more back: torch would keep it for this process."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


class Order(Protocol):
    """Order of work on one device, as one thread uses it."""

    def aside(self) -> AbstractContextManager[None]:
        """Run work beside the engine's steps; all of it has ended when the context does."""

    def settle(self) -> None:
        """Wait for all that this process has begun on the device."""


class CudaOrder:
    """A stream of its own; streams wait for each other at pauses only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def aside(self) -> Iterator[None]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


class HostOrder:
    """Order of work on host memory, in Triton's interpreter: all has ended when it returns."""

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        """Nothing is under way."""


def order_of(device: torch.device) -> Order:
    """The order of things on a device."""
    return CudaOrder(device) if device.type == "cuda" else HostOrder()


PIECE_BYTES = 64 << 20
_ALIGNED = 16
_INT32_PLACES = 1 << 31


@dataclass(frozen=True, slots=True)
class Packed:
    """Changes `first` to `end` of the change number `row`: places, old and new values, in line."""

    row: int
    target: DeviceBits
    change: Change
    first: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.first

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the device."""
        return self._starts[-1]

    @property
    def host(self) -> NDArray[np.uint8]:
        part = slice(self.first, self.end)
        change = self.change
        places = change.indices[part].astype(_place_type(self.target))
        packed = np.zeros(self.nbytes, np.uint8)
        parts = places, change.old[part], change.new[part]
        for start, values in zip(self._starts[:3], parts, strict=True):
            packed[start : start + values.nbytes] = values.view(np.uint8)
        return packed

    def views(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(places, old, new) of the bytes once they are on the device."""
        import torch

        place = torch.int32 if _place_type(self.target).itemsize == 4 else torch.int64
        values = self.target.flat.dtype
        starts = self._starts
        return (
            packed[: self.count * place.itemsize].view(place),
            packed[starts[1] : starts[1] + self.count * values.itemsize].view(values),
            packed[starts[2] : starts[2] + self.count * values.itemsize].view(values),
        )

    @property
    def _starts(self) -> tuple[int, int, int, int]:
        """Offsets of places, old and new values, and the end."""
        places = _aligned(self.count * _place_type(self.target).itemsize)
        values = _aligned(self.count * self.target.itemsize)
        return 0, places, places + values, places + 2 * values


def pack(changes: Sequence[tuple[DeviceBits, Change]]) -> Iterator[Packed]:
    """Cut changes into pieces of at most PIECE_BYTES; nothing is copied yet."""
    for row, (target, change) in enumerate(changes):
        each = _place_type(target).itemsize + 2 * target.itemsize
        most = PIECE_BYTES // each - _ALIGNED
        for first in range(0, change.indices.size, most):
            yield Packed(row, target, change, first, min(first + most, change.indices.size))


def _place_type(target: DeviceBits) -> np.dtype[np.signedinteger]:
    return np.dtype(np.int32 if target.size <= _INT32_PLACES else np.int64)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


_TILE = 1024


@dataclass(frozen=True, slots=True)
class DeviceExchange:
    """`counts` i64[changes, 2]; `slot`: room for one streamed piece, empty when there is none."""

    resident: tuple[tuple[Packed, torch.Tensor], ...]
    streamed: tuple[tuple[Packed, torch.Tensor], ...]
    slot: torch.Tensor
    counts: torch.Tensor
    order: Order

    @property
    def device_bytes(self) -> int:
        """Memory of the device that it holds."""
        held = [packed for _, packed in self.resident]
        return sum(tensor.nbytes for tensor in (*held, self.slot, self.counts))

    def run(self, *, back: bool = False) -> Int64s:
        """Write all new values, or all old ones `back`; see `Exchange`."""
        # Steps that the engine has launched still read what is overwritten here.
        self.order.settle()
        with torch.cuda.device_of(self.counts):  # type: ignore[no-untyped-call]
            self.counts.zero_()
            for piece, packed in self.resident:
                launch(piece, packed, self.counts, back=back)
            for piece, host in self.streamed:
                packed = self.slot[: piece.nbytes]
                packed.copy_(host, non_blocking=True)
                launch(piece, packed, self.counts, back=back)
        # Its answer is the first that the host waits for, and all before it has ended then.
        counts: Int64s = self.counts.cpu().numpy()
        return counts.copy()


def launch(piece: Packed, packed: torch.Tensor, counts: torch.Tensor, *, back: bool) -> None:
    """Exchange one piece and read it back, on the device's current stream."""
    places, old, new = piece.views(packed)
    old, new = (new, old) if back else (old, new)
    target, row = piece.target.flat, counts[piece.row]
    grid = (-(-piece.count // _TILE),)
    kernels.exchange[grid](target, places, old, new, row, piece.count, tile_size=_TILE)
    kernels.read_back[grid](target, places, new, row, piece.count, tile_size=_TILE)


def stage(changes: Sequence[tuple[DeviceBits, Change]], resident_bytes: int) -> DeviceExchange:
    """Bring changes to their device; of what is beyond `resident_bytes`, a slot takes its turns.

    Any thread may call it while the engine serves. Raises IndexError for an index outside, and
    DeviceMemoryError where the device has no room; nothing was written then.
    """
    check_indices(changes)
    device = changes[0][0].flat.device
    order = order_of(device)
    pieces = list(pack(changes))
    kept = _first_within(pieces, resident_bytes)
    needed = sum(piece.nbytes for piece in pieces[:kept])
    with named_shortage(device, f"the {needed >> 20} MiB of an update's changes"), order.aside():
        counts = torch.zeros((len(changes), 2), dtype=torch.int64, device=device)
        resident = tuple((p, uploaded(p, device)) for p in pieces[:kept])
        streamed = tuple((p, waiting(p, device)) for p in pieces[kept:])
        room = PIECE_BYTES if streamed else 0
        slot = torch.empty(room, dtype=torch.uint8, device=device)
    return DeviceExchange(resident, streamed, slot, counts, order)


def _first_within(pieces: Sequence[Packed], room: int) -> int:
    """Return the number of first pieces that have room together."""
    for number, piece in enumerate(pieces):
        room -= piece.nbytes
        if room < 0:
            return number
    return len(pieces)


def uploaded(piece: Packed, device: torch.device) -> torch.Tensor:
    """A piece in memory of the device."""
    return torch.from_numpy(piece.host).to(device)


def waiting(piece: Packed, device: torch.device) -> torch.Tensor:
    """A piece in host memory that the device reads by itself."""
    host = torch.from_numpy(piece.host)
    return host.pin_memory() if device.type == "cuda" else host
