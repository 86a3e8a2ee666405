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
    """The changes of one range, in host memory as far as they are asked for."""

    @property
    def count(self) -> int:
        """Changed weights."""

    @property
    def growth(self) -> int:
        """Increase of the tensor's digest, mod 2^64."""

    @property
    def gaps(self) -> NDArray[np.uint32]:
        """Distance of each changed weight to the one before, less one."""

    @property
    def codes(self) -> Bits:
        """Zigzag coded ulp delta of each."""

    def class_counts(self, kind: WeightClass) -> NDArray[np.int64]:
        """Changed weights of each class, i64[CLASSES]."""

    def by_class(
        self, kind: WeightClass, ends: Bytes, present: Bytes, starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], Bits]:
        """Return (rank gaps, codes), sorted by class, see `kernels.range_coder`.

        `ends` u8: lowest, first, last, highest class; those that lie between two of a side are one.
        `present` u8[k]: classes that hold all changes then, ascending; `starts`: where each begins,
        may be used up.
        """


@dataclass(frozen=True, slots=True)
class Marks:
    """The changes of a crowded range: a bit for each weight, codes, growth of the digest."""

    bitmap: Bytes
    codes: Bits
    growth: int


Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Change:
    """At distinct `indices` i64[n] of flat weights `old` [n] become `new` [n]."""

    indices: Int64s
    old: Bits
    new: Bits


class Exchange(Protocol):
    """Changes that are where their targets are."""

    def run(self, *, back: bool = False) -> Int64s:
        """Write all new values, or all old ones `back`; running it again is harmless.

        Returns i64[changes, 2]: 0 when all that was overwritten was what it should have been, 0
        when all of it reads as it was written. Bits say more than sums of them.
        """


def check_indices(changes: Sequence[tuple[Any, Change]]) -> None:
    """Raise IndexError for an index outside of its target."""
    for target, change in changes:
        at, size = change.indices, target.size
        if at.size and (int(at.min()) < 0 or int(at.max()) >= size):
            raise IndexError(f"a change lies outside its {size} weights; stage the update again")


Range = TypeVar("Range", contravariant=True)


class Processor(Protocol[Range]):
    """Loops over flat weights of 1, 2, 4 or 8 bytes that are in one kind of memory."""

    def compare(self, old: Range, new: Range, room: int, first: int) -> Difference | None:
        """Compare two ranges that begin at index `first`; None when over `room` weights changed."""

    def mark(self, old: Range, new: Range, first: int) -> Marks:
        """Compare two ranges however much changed."""

    def read(self, bits: Range) -> Bits:
        """All weights of a range, in host memory; may be the range itself."""

    def digest(self, bits: Range, first: int) -> int:
        """Return what a range that begins at index `first` adds to its tensor's digest."""

    def stage(self, changes: Sequence[tuple[Any, Change]], resident_bytes: int) -> Exchange:
        """Bring changes of targets, at least one, to their memory; nothing is written.

        While weights are used, and from any thread. On a device it takes `resident_bytes` of memory
        at most, and 64 MiB; what is beyond passes through these under the pause. Raises IndexError
        for an index outside and DeviceMemoryError.
        """


def processor_of(*ranges: Flat) -> Processor[Any]:
    """Return the processor that works where all `ranges` are; TensorFormatError for several."""
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
