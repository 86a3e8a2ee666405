"""Kernel backend on a device: Triton's loops over all weights, then torch over the changed ones.

Triton marks which weights of a range changed, a bit for each, and counts them by tile. Their
indices, codes, ranks by class and digest sums follow from the marks.

Everything is launched on the device's current stream and waits only where a number or the changes
come to the host. Temporary memory: an eighth of a byte for each weight and 8 for each changed one;
classes of the `compact` encoding add 4 for each weight of the chunk.

Exchange of weights on a device: changes are staged there, as far as memory is granted for them.

resident   pieces that wait on the device; under the pause nothing of them is copied
streamed   pieces beyond that wait in pinned memory and pass one after the other through a slot

A piece is one run of bytes: places, old and new values of a part of a tensor's changes. Staging
runs beside the engine's steps, an exchange only after they have ended. Under the pause nothing is
allocated, and the host waits once, for the counts. Where the device has no room, one error names
the shortage, and nothing was written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weight_transfer.errors import DeviceMemoryError
from weight_transfer.format.tensors import Bits, DeviceBits, WeightClass, to_device, to_host
from weight_transfer.kernels import triton_kernels as kernels
from weight_transfer.kernels.processor import CLASSES, Bytes, Change, Int64s, Marks, check_indices

_BLOCK = 4096
RANKED = 128
"""Number of weights of a block that are compared with each other at once."""
_MOST_TILE, _TILE_BYTES = 4096, 8192
_TILE, _TILES = 1024, 8
# A histogram has a slot for each thread of a warp at least.
_LEAST_SLOTS = 32
PIECE_BYTES = 64 << 20
_ALIGNED = 16
_INT32_PLACES = 1 << 31


def slots_of(ends: Bytes, present: Bytes) -> NDArray[np.int32]:
    """Return for each of CLASSES the slot that counts it, i32: its position in `present`.

    Classes that are not present share the slot behind all others. `ends`, `present`: see
    `Difference.by_class`.
    """
    lowest, first, last, highest = (int(end) for end in ends)
    joined = np.arange(CLASSES)
    joined[lowest:first] = first
    joined[last + 1 : highest + 1] = last
    slots = np.full(CLASSES, present.size, np.int32)
    slots[present] = np.arange(present.size)
    found: NDArray[np.int32] = slots[joined]
    return found


def ranks_by_slot(
    old: DeviceBits, bitmap: torch.Tensor, kind: WeightClass, slots: torch.Tensor, used: int
) -> torch.Tensor:
    """Return i32[weights]: for each weight that `bitmap` marks, how many of its slot come before
    it.

    Other elements are undefined. `slots` i32[CLASSES]: slot of each class; the first `used` slots
    are in use.
    """
    slot_count = max(_LEAST_SLOTS, 1 << (used - 1).bit_length())
    blocks = -(-old.size // _BLOCK)
    device = old.flat.device
    # A slot's counts lie side by side: the sum over blocks is as parallel as there are blocks.
    counts = torch.empty((slot_count, blocks), dtype=torch.int32, device=device)
    ranks = torch.empty(old.size, dtype=torch.int32, device=device)
    shape = {"block_size": _BLOCK, "slot_count": slot_count}
    kernels.count_classes[(blocks,)](
        old.flat, slots, counts, old.size, kind.shift, kind.mask, **shape
    )
    before = torch.cumsum(counts, 1, dtype=torch.int32) - counts
    kernels.rank_changed[(blocks,)](
        old.flat, slots, bitmap, before, ranks, old.size, kind.shift, kind.mask,
        **shape, tile_size=RANKED,
    )  # fmt: skip
    return ranks


@dataclass(frozen=True, slots=True)
class Marked:
    """Changed weights of a range on a device as a bitmap in whole tiles, and their number.

    `starts` i64[tiles]: marked weights in the tiles before.
    """

    bitmap: torch.Tensor
    starts: torch.Tensor
    count: int
    tile_size: int

    def indices(self) -> torch.Tensor:
        """Return the indices of the marked weights on the device, ascending, i64[count]."""
        indices = torch.empty(self.count, dtype=torch.int64, device=self.bitmap.device)
        if self.count:
            kernels.list_marked[(self.starts.numel(),)](
                self.bitmap, self.starts, indices, tile_size=self.tile_size
            )
        return indices


def _marked(old: DeviceBits, new: DeviceBits) -> Marked:
    """Return a bitmap of where two ranges of one size and width differ."""
    tile_size = min(_MOST_TILE, _TILE_BYTES // old.itemsize)
    tiles = -(-old.size // tile_size)
    device = old.flat.device
    bitmap = torch.empty(tiles * tile_size // 8, dtype=torch.uint8, device=device)
    counts = torch.empty(tiles, dtype=torch.int32, device=device)
    if tiles:
        kernels.mark[(tiles,)](old.flat, new.flat, bitmap, counts, old.size, tile_size=tile_size)
    ends = torch.cumsum(counts, 0)
    count = int(ends[-1]) if tiles else 0
    return Marked(bitmap, ends - counts, count, tile_size)


def total(sums: torch.Tensor) -> int:
    """Return the sum of an i64 tensor, mod 2^64; waits for the device."""
    return int(sums.sum()) % (1 << 64)


def digest(bits: DeviceBits, first: int) -> int:
    """Return what a range that begins at index `first` adds to its tensor's digest, mod 2^64."""
    programs = -(-bits.size // (_TILE * _TILES))
    if not programs:
        return 0
    sums = torch.empty(programs, dtype=torch.int64, device=bits.flat.device)
    shape = {"width_bits": 8 * bits.itemsize, "tile_size": _TILE, "tiles": _TILES}
    with torch.cuda.device_of(bits.flat):  # type: ignore[no-untyped-call]
        kernels.sum_tiles[(programs,)](bits.flat, sums, bits.size, first, **shape)
    return total(sums)


@dataclass(frozen=True)
class DeviceDifference:
    """Changed weights of one range on a device.

    Gaps and codes are copied to the host once, when read. `indices` i64, `gaps_there` i32 (bits of
    u32), `codes_there`: all [count], on the device.
    """

    old: DeviceBits
    marked: Marked
    indices: torch.Tensor
    gaps_there: torch.Tensor
    codes_there: torch.Tensor
    growth: int

    @property
    def count(self) -> int:
        return self.marked.count

    @functools.cached_property
    def gaps(self) -> NDArray[np.uint32]:
        return to_host(self.gaps_there).view(np.uint32)

    @functools.cached_property
    def codes(self) -> Bits:
        return to_host(self.codes_there)

    def class_counts(self, kind: WeightClass) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = (
            torch.bincount(self._classes(kind), minlength=CLASSES).cpu().numpy()
        )
        return counts

    def by_class(
        self, kind: WeightClass, ends: Bytes, present: Bytes, starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], Bits]:
        """Return (rank gaps, codes) of the changes sorted by class, in host memory."""
        slots = slots_of(ends, present)
        with torch.cuda.device_of(self.old.flat):  # type: ignore[no-untyped-call]
            where = to_device(slots, self.old.flat)
            ranks = ranks_by_slot(self.old, self.marked.bitmap, kind, where, int(slots.max()) + 1)
            keys, order = torch.sort(where[self._classes(kind)], stable=True)
            ranks = ranks[self.indices[order]].to(torch.int64)
            gaps = ranks.clone()
            # The first change of a class follows none.
            gaps[1:] -= torch.where(keys[1:] == keys[:-1], ranks[:-1] + 1, 0)
            codes = self.codes_there[order]
            return to_host(gaps.to(torch.int32)).view(np.uint32), to_host(codes)

    def _classes(self, kind: WeightClass) -> torch.Tensor:
        """Return the magnitude class of each changed weight on the device, i64[count]."""
        return (self.old.flat[self.indices].to(torch.int64) >> kind.shift) & kind.mask


def _difference(old: DeviceBits, new: DeviceBits, marks: Marked, first: int) -> DeviceDifference:
    """Return the marked changes with gaps and codes; `first`: index of the range's first weight."""
    indices = marks.indices()
    programs = -(-marks.count // _TILE)
    gaps = torch.empty(marks.count, dtype=torch.int32, device=indices.device)
    codes = torch.empty(marks.count, dtype=old.flat.dtype, device=indices.device)
    sums = torch.empty(programs, dtype=torch.int64, device=indices.device)
    if programs:
        kernels.describe[(programs,)](
            old.flat, new.flat, indices, gaps, codes, sums, marks.count, first,
            width_bits=8 * old.itemsize, tile_size=_TILE,
        )  # fmt: skip
    return DeviceDifference(old, marks, indices, gaps, codes, total(sums))


def compare(old: DeviceBits, new: DeviceBits, room: int, first: int) -> DeviceDifference | None:
    """Return the changed weights of two ranges, None when more than `room` weights changed.

    `first`: index of the ranges' first weight in its tensor.
    """
    with torch.cuda.device_of(old.flat):  # type: ignore[no-untyped-call]
        marks = _marked(old, new)
        if marks.count > room:
            return None
        return _difference(old, new, marks, first)


def mark(old: DeviceBits, new: DeviceBits, first: int) -> Marks:
    """Return bitmap and codes of the changes between two ranges, however many weights changed."""
    with torch.cuda.device_of(old.flat):  # type: ignore[no-untyped-call]
        marks = _marked(old, new)
        found = _difference(old, new, marks, first)
        bitmap = to_host(marks.bitmap)[: (old.size + 7) // 8]
        return Marks(bitmap, found.codes, found.growth)


def read(bits: DeviceBits) -> Bits:
    """Return a copy of all weights of a range in host memory."""
    return to_host(bits.flat)


@contextmanager
def named_shortage(device: torch.device, what: str) -> Iterator[None]:
    """Run the block; raise DeviceMemoryError that names `what` if the device has no memory for it.

    Unused cached memory is released then.
    """
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
    """Return torch's cached, unused GPU memory to the device; do nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Run the block on a CUDA stream of its own, beside the engine's steps, and wait for its end.

    Streams wait for each other at pauses only. On other devices the block just runs.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


def wait_for_steps(device: torch.device) -> None:
    """Wait until everything that this process has launched on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Packed:
    """Piece of a staged change, as one run of bytes: places, old and new values.

    It holds elements `first` to `end` of the change that has number `row`.
    """

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
        """Bytes that the piece takes on the device, padding included."""
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
        """Return (places, old values, new values) as views of the piece's bytes on the device."""
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
        """Byte offsets of places, old values and new values, and the end."""
        places = _aligned(self.count * _place_type(self.target).itemsize)
        values = _aligned(self.count * self.target.itemsize)
        return 0, places, places + values, places + 2 * values


def pack(changes: Sequence[tuple[DeviceBits, Change]]) -> Iterator[Packed]:
    """Yield the changes cut into pieces of at most PIECE_BYTES; nothing is copied yet."""
    for row, (target, change) in enumerate(changes):
        each = _place_type(target).itemsize + 2 * target.itemsize
        most = PIECE_BYTES // each - _ALIGNED
        for first in range(0, change.indices.size, most):
            yield Packed(row, target, change, first, min(first + most, change.indices.size))


def _place_type(target: DeviceBits) -> np.dtype[np.signedinteger]:
    return np.dtype(np.int32 if target.size <= _INT32_PLACES else np.int64)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, slots=True)
class DeviceExchange:
    """Staged changes of weights on a device, ready to be written.

    `resident`: pieces in device memory. `streamed`: pieces in host memory, which pass through
    `slot` one after the other; `slot` is empty when there are none. `counts` i64[changes, 2]:
    result of a run.
    """

    resident: tuple[tuple[Packed, torch.Tensor], ...]
    streamed: tuple[tuple[Packed, torch.Tensor], ...]
    slot: torch.Tensor
    counts: torch.Tensor

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the exchange holds."""
        held = [packed for _, packed in self.resident]
        return sum(tensor.nbytes for tensor in (*held, self.slot, self.counts))

    def run(self, *, back: bool = False) -> Int64s:
        """Write all new values, or all old ones with `back`.

        Return counts as `Exchange.run` does.
        """
        # Steps that the engine has launched still read what is overwritten here.
        wait_for_steps(self.counts.device)
        with torch.cuda.device_of(self.counts):  # type: ignore[no-untyped-call]
            self.counts.zero_()
            for piece, packed in self.resident:
                launch(piece, packed, self.counts, back=back)
            for piece, host in self.streamed:
                packed = self.slot[: piece.nbytes]
                packed.copy_(host, non_blocking=True)
                launch(piece, packed, self.counts, back=back)
        # The host waits here for the first time, and all launched work has ended then.
        counts: Int64s = self.counts.cpu().numpy()
        return counts.copy()


def launch(piece: Packed, packed: torch.Tensor, counts: torch.Tensor, *, back: bool) -> None:
    """Launch the write and the read-back of one piece on the device's current stream.

    `counts` grows by the weights that were, or read, otherwise than expected. The call does not
    wait.
    """
    places, old, new = piece.views(packed)
    old, new = (new, old) if back else (old, new)
    target, row = piece.target.flat, counts[piece.row]
    grid = (-(-piece.count // _TILE),)
    kernels.exchange[grid](target, places, old, new, row, piece.count, tile_size=_TILE)
    kernels.read_back[grid](target, places, new, row, piece.count, tile_size=_TILE)


def stage(changes: Sequence[tuple[DeviceBits, Change]], resident_bytes: int) -> DeviceExchange:
    """Bring (target, change) pairs to the targets' device, and return them ready to be written.

    What exceeds `resident_bytes` waits in host memory. No weight is written. Any thread may call it
    while the engine serves. Raises IndexError for an index outside of its target, and
    DeviceMemoryError where the device has no room.
    """
    check_indices(changes)
    device = changes[0][0].flat.device
    pieces = list(pack(changes))
    kept = _first_within(pieces, resident_bytes)
    needed = sum(piece.nbytes for piece in pieces[:kept])
    with named_shortage(device, f"the {needed >> 20} MiB of an update's changes"), aside(device):
        counts = torch.zeros((len(changes), 2), dtype=torch.int64, device=device)
        resident = tuple((p, uploaded(p, device)) for p in pieces[:kept])
        streamed = tuple((p, waiting(p, device)) for p in pieces[kept:])
        room = PIECE_BYTES if streamed else 0
        slot = torch.empty(room, dtype=torch.uint8, device=device)
    return DeviceExchange(resident, streamed, slot, counts)


def _first_within(pieces: Sequence[Packed], room: int) -> int:
    """Return how many of the first pieces fit into `room` bytes together."""
    for number, piece in enumerate(pieces):
        room -= piece.nbytes
        if room < 0:
            return number
    return len(pieces)


def uploaded(piece: Packed, device: torch.device) -> torch.Tensor:
    """Return a piece's bytes in memory of the device."""
    return torch.from_numpy(piece.host).to(device)


def waiting(piece: Packed, device: torch.device) -> torch.Tensor:
    """Return a piece's bytes in host memory, pinned for a GPU so that it reads them by itself."""
    host = torch.from_numpy(piece.host)
    return host.pin_memory() if device.type == "cuda" else host
