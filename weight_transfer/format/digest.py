"""Digest of a tensor: a position-mixed 64-bit sum, updatable in O(changed).

digest(t) = Σ_i mix(i, bits[i]) mod 2^64, with mix(i, v) = finalise((i + 1)·γ + v) and SplitMix64's
finaliser (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
The position is inside the mix, so a permutation of the same values has another digest, which an
XOR or a plain sum would miss. It guards against mistakes; signatures guard against enemies.

A `Block` is a rectangle of a tensor, seen as rows x row elements; the digest is the sum over blocks
that cover the tensor once. No IO.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import TensorFormatError
from weight_transfer.format.tensors import Bits, Flat
from weight_transfer.kernels.cpu import sum_block, sum_difference, sum_pending
from weight_transfer.kernels.processor import processor_of

Range: TypeAlias = tuple[int, int]
"""Range of rows, columns or weights: [first, end)."""
MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class Block:
    """Rectangle of a tensor: rows [a, b) x columns [c, d), each row having `row_elements` weights.

    Its weights are numbered row by row: `local` indices, 0 to `elements`. Raises TensorFormatError
    for an empty rectangle or one outside of a row.
    """

    rows: Range
    columns: Range
    row_elements: int

    def __post_init__(self) -> None:
        (a, b), (c, d) = self.rows, self.columns
        whole = self.columns == (0, self.row_elements)
        if not (0 <= a < b and (whole or 0 <= c < d <= self.row_elements)):
            raise TensorFormatError(
                f"rows {self.rows} x columns {self.columns} is no block of rows of "
                f"{self.row_elements} weights"
            )

    @classmethod
    def of_rows(cls, rows: Range, row_elements: int) -> Block:
        """Return the block of all columns of rows [a, b)."""
        return cls(rows, (0, row_elements), row_elements)

    @property
    def is_whole_rows(self) -> bool:
        """True if the block has all columns, so that it is one flat range of the tensor."""
        return self.columns == (0, self.row_elements)

    @property
    def width(self) -> int:
        """Number of weights in each of the block's rows."""
        return self.columns[1] - self.columns[0]

    @property
    def elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * self.width

    @property
    def first(self) -> int:
        """Flat index in the tensor of the block's first weight."""
        return self.rows[0] * self.row_elements + self.columns[0]

    def cut(self, bits: Bits) -> Bits:
        """Return the block's weights out of a whole tensor's flat `bits`, row by row.

        It is a view of `bits` for whole rows and a copy for some columns.
        """
        if self.is_whole_rows:
            return bits[self.first : self.first + self.elements]
        rows = bits.reshape(-1, self.row_elements)[slice(*self.rows), slice(*self.columns)]
        cut: Bits = rows.ravel()
        return cut

    def flat(self, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn local indices into flat indices in the tensor, in place; return them, order kept."""
        if not self.is_whole_rows:
            rows = local // self.width
            rows *= self.row_elements - self.width
            local += rows
        local += self.first
        return local

    def parts(self, most_elements: int) -> Iterator[Block]:
        """Yield the block cut by rows into blocks of at most `most_elements` weights.

        Each has one row at least, however long it is.
        """
        first, end = self.rows
        step = max(1, most_elements // max(1, self.width))
        for row in range(first, end, step):
            yield Block((row, min(end, row + step)), self.columns, self.row_elements)


def tiling_fault(rows: int, row_elements: int, blocks: Iterable[tuple[Range, Range]]) -> str:
    """Return a text that says where (rows, columns) pairs fail to cover a tensor exactly once, ""
    if they do.

    They must come in order of (first row, first column): then each has to begin where the lowest
    and leftmost weight is that none before it covers. So it is enough to remember how far down each
    stretch of columns is covered, and n blocks cost O(n), whatever they claim.
    """
    width = max(1, row_elements)  # Rows without weights are there too.
    covered = {0: (width, 0)}  # first column → (end column, row down to which it is covered)
    for (a, b), (c, d) in blocks:
        if (c, d) == (0, row_elements):
            d = width
        if not (0 <= a < b <= rows and 0 <= c < d <= width):
            return f"rows {a}..{b} x columns {c}..{d} lie outside"
        at = c
        while at < d:
            end, row = covered.pop(at, (0, -1))
            if row != a:
                return f"a gap or an overlap at row {a}, column {at}"
            if end > d:
                covered[d] = end, row
            at = end
        covered[c] = d, b
    short = [(row, column) for column, (_, row) in covered.items() if row != rows]
    return f"nothing from row {min(short)[0]}, column {min(short)[1]} on" if short else ""


def digest_part(bits: Flat, first: int) -> int:
    """Return what a flat range from index `first` on adds to its tensor's digest, mod 2^64."""
    return processor_of(bits).digest(bits, first)


def block_part(bits: Flat, block: Block) -> int:
    """Return what a block adds to its tensor's digest; `bits` are the block's weights, row by row.

    Raises TensorFormatError for some columns of a tensor on a device.
    """
    if block.is_whole_rows:
        return digest_part(bits, block.first)
    if not isinstance(bits, np.ndarray):
        raise TensorFormatError(
            f"columns {block.columns} are on {bits.place}; shard by rows there, or copy them here"
        )
    return int(sum_block(bits, block.first, block.width, block.row_elements))


def block_growth(old: Flat, new: Flat, block: Block) -> int:
    """Return the increase of a tensor's digest, mod 2^64, when a block goes from `old` to `new`."""
    return (block_part(new, block) - block_part(old, block)) % MODULUS


def digest_of(bits: Flat) -> int:
    """Return the 64-bit digest of a whole tensor's bits, 0 for an empty one."""
    return processor_of(bits).digest(bits, 0)


def updated(digest: int, indices: NDArray[np.int64], old: Bits, new: Bits) -> int:
    """Return a tensor's digest after its weights at distinct `indices` went from `old` to `new`.

    `digest`: the one before; `old` and `new` hold the changed weights alone.
    """
    return (digest + int(sum_difference(indices, old, new))) % MODULUS


def after_write(digest: int, bits: Bits, indices: NDArray[np.int64], values: Bits) -> int:
    """Return the digest that `bits` will have once `values` are written to `indices`.

    Nothing is written.
    """
    return (digest + int(sum_pending(bits, indices, values))) % MODULUS
