"""Interface of a kernel backend: weights are compared, summed and overwritten where they are.

publisher  compare → a difference; too much has changed → mark, read
receiver   stage, while serving → run, under the engine's pause; chunks are decoded on the host

An `Exchange` puts new values in the place of old ones, and back:

stage   while serving: the changes are brought to the weights' memory; no weight is written
run     under the engine's pause: compare with the old, write the new, read back

Ranges of weights stay where they are; data about changed weights comes and goes in host memory.
All backends give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import TensorFormatError
from weight_transfer.format.tensors import Bits, Flat, WeightClass

Bytes: TypeAlias = NDArray[np.uint8]
CLASSES = 256


class Difference(Protocol):
    """Changed weights of one range; gaps and codes are in host memory once they are read."""

    @property
    def count(self) -> int:
        """Number of weights that differ between the two compared ranges."""

    @property
    def growth(self) -> int:
        """Increase of the tensor's digest by the changes, mod 2^64."""

    @property
    def gaps(self) -> NDArray[np.uint32]:
        """Number of unchanged weights between each changed weight and the one before,
        u32[count]."""

    @property
    def codes(self) -> Bits:
        """Zigzag coded difference (new − old as integers) of each changed weight."""

    def class_counts(self, kind: WeightClass) -> NDArray[np.int64]:
        """Return the number of changed weights in each magnitude class, i64[CLASSES]."""

    def by_class(
        self, kind: WeightClass, ends: Bytes, present: Bytes, starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], Bits]:
        """Return (rank gaps, codes) of the changes sorted by class, see `kernels.range_coder`.

        `ends` u8 (lowest, first, last, highest): classes from lowest to first are merged, as are
        those from last to highest. `present` u8[k]: classes that hold all changes then, ascending.
        `starts` i64[k]: where each begins in the result; it may be overwritten.
        """


@dataclass(frozen=True, slots=True)
class Marks:
    """Changes of a crowded range: a bit for each weight, codes of the changed ones, growth of
    the digest."""

    bitmap: Bytes
    codes: Bits
    growth: int


Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Change:
    """Change of flat weights: at distinct `indices` i64[n], values `old` [n] become `new` [n]."""

    indices: Int64s
    old: Bits
    new: Bits


class Exchange(Protocol):
    """Staged changes in the memory of their target weights, ready to be written."""

    def run(self, *, back: bool = False) -> Int64s:
        """Write all new values to the targets, or all old ones with `back`.

        Running it again is harmless. Return i64[changes, 2] for (overwritten values, values read
        back): 0 where all were as expected, other numbers where some were not.
        """


def check_indices(changes: Sequence[tuple[Any, Change]]) -> None:
    """Raise IndexError if a change has an index outside of its target."""
    for target, change in changes:
        at, size = change.indices, target.size
        if at.size and (int(at.min()) < 0 or int(at.max()) >= size):
            raise IndexError(f"a change lies outside its {size} weights; stage the update again")


Range = TypeVar("Range", contravariant=True)


class Processor(Protocol[Range]):
    """Kernel backend for one kind of memory, host or GPU: loops over flat weights of 1, 2, 4 or 8
    bytes.

    The modules `kernels.cpu` and `kernels.device` implement it.
    """

    def compare(self, old: Range, new: Range, room: int, first: int) -> Difference | None:
        """Return the changed weights of two ranges, None when more than `room` weights changed.

        `first`: index of the ranges' first weight in its tensor.
        """

    def mark(self, old: Range, new: Range, first: int) -> Marks:
        """Return bitmap and codes of the changes between two ranges, however many weights
        changed."""

    def read(self, bits: Range) -> Bits:
        """Return all weights of a range in host memory, perhaps the range itself."""

    def digest(self, bits: Range, first: int) -> int:
        """Return what a range that begins at index `first` adds to its tensor's digest, mod
        2^64."""

    def stage(self, changes: Sequence[tuple[Any, Change]], resident_bytes: int) -> Exchange:
        """Bring (target, change) pairs to the targets' memory, and return them ready to be written.

        No weight is written, and the engine may use the weights meanwhile. Any thread may call it.
        On a device the changes take at most `resident_bytes` of memory and 64 MiB; the rest passes
        through these during `run`. Raises IndexError for an index outside of its target, and
        DeviceMemoryError.
        """


def processor_of(*ranges: Flat) -> Processor[Any]:
    """Return the backend for the memory in which all `ranges` are: `kernels.cpu` or
    `kernels.device`.

    Raises TensorFormatError when they are on several devices.
    """
    places = {"the host" if isinstance(bits, np.ndarray) else bits.place for bits in ranges}
    if len(places) > 1:
        raise TensorFormatError(
            f"weights to be compared are on {' and '.join(sorted(places))}; put both on one"
        )
    if isinstance(ranges[0], np.ndarray):
        from weight_transfer.kernels import cpu

        return cpu
    from weight_transfer.kernels import device

    return device
