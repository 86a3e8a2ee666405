"""Processor: where weights are is where they are compared, summed and overwritten.

publisher  compare → a difference; too much has changed → mark, read
receiver   expand → indices and values; stage, while serving → run, under the engine's pause
Ranges of weights stay where they are; what is about changed weights comes and goes in host memory.
All processors give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import TensorFormatError
from weight_transfer.kernels.device.bits import DeviceBits
from weight_transfer.tensors import Bits

if TYPE_CHECKING:
    from weight_transfer.kernels.difference import Difference, Marks
    from weight_transfer.kernels.exchange import Change, Exchange

Flat: TypeAlias = Bits | DeviceBits
"""Flat weights, wherever they are."""
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
        """What a range that begins at index `first` adds to the digest of its tensor."""

    def expand(
        self, old: Range, gaps: NDArray[np.uint32], codes: Bits
    ) -> tuple[NDArray[np.int64], Bits]:
        """Return (flat indices, new values). Raises ValueError for changes that are none of old."""

    def stage(self, changes: Sequence[Change[Any]], resident_bytes: int) -> Exchange:
        """Bring changes, at least one, to the memory of their targets; nothing is written.

        While weights are used, and from any thread. On a device it takes `resident_bytes` of memory
        at most, and 64 MiB; what is beyond passes through these under the pause. Raises IndexError
        for a place outside and DeviceMemoryError.
        """


def processor_of(*ranges: Flat) -> Processor[Any]:
    """Return the processor that works where all `ranges` are; TensorFormatError for several."""
    places = {"the host" if isinstance(bits, np.ndarray) else bits.place for bits in ranges}
    if len(places) > 1:
        raise TensorFormatError(
            f"weights to be compared are on {' and '.join(sorted(places))}; put both on one"
        )
    if isinstance(ranges[0], np.ndarray):
        from weight_transfer.kernels.cpu import CPU

        return CPU
    from weight_transfer.kernels.device.processor import DEVICE

    return DEVICE
