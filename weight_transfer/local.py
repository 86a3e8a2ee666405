"""The weights that a rank holds, read a rectangle at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weight_transfer.tensors import Bits


class LocalTensor(Protocol):
    """A parameter of this rank, seen flat."""

    @property
    def dtype(self) -> str:
        """As it is published."""
        ...

    @property
    def elements(self) -> int:
        """Weights here."""
        ...

    def read(self, offset: int, rows: int, width: int, stride: int) -> Bits:
        """Return `rows` of `width` weights row by row, `stride` apart, the first at `offset`."""
        ...


@dataclass(frozen=True, slots=True)
class LocalBits:
    """A parameter in memory; what is read is a view where rows follow each other."""

    dtype: str
    bits: Bits

    @property
    def elements(self) -> int:
        """Weights here."""
        return self.bits.size

    def read(self, offset: int, rows: int, width: int, stride: int) -> Bits:
        """See LocalTensor."""
        if stride == width or rows == 1:
            return self.bits[offset : offset + rows * width]
        step = self.bits.itemsize
        begin = self.bits[offset : offset + (rows - 1) * stride + width]
        shape, strides = (rows, width), (stride * step, step)
        lines = np.lib.stride_tricks.as_strided(begin, shape, strides, writeable=False)
        return np.ascontiguousarray(lines).reshape(-1)
