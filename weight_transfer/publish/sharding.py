"""Shard maps: which block of which checkpoint tensor each part of a rank's parameters holds. No IO.

A rank's local parameter is seen flat. A piece of it is a rectangle: it fills a block of a
checkpoint tensor, whose rows lie `stride` weights apart in the parameter, the first at `offset`.

    local [q0 q1 k0 v0 | q2 q3 k1 v1]  ──►  q_proj rows 0..2 and 2..4, k_proj rows 0..1 and …

The pieces of all ranks cover each checkpoint tensor exactly once: of replicas, one publishes.

`gate_up`, `grouped_qkv` and `vocabulary` are Megatron's fused and padded parameters, for
tensor-parallel rank `rank` of `ranks`. Its plain layers are the general cases: column-parallel ones
are `row_shard`, row-parallel ones `column_shard`, norms `whole` with the rank as the replica's
number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol, TypeAlias

import numpy as np

from weight_transfer.errors import ShardError
from weight_transfer.format.digest import Block, Range
from weight_transfer.format.tensors import Bits


class LocalTensor(Protocol):
    """A parameter of this rank, seen as one flat array of weights."""

    @property
    def dtype(self) -> str:
        """Name of the type in which the weights are published."""
        ...

    @property
    def elements(self) -> int:
        """Number of weights that this rank holds."""
        ...

    def read(self, offset: int, rows: int, width: int, stride: int) -> Bits:
        """Return `rows` runs of `width` weights as one flat array of bits.

        The first run begins at weight `offset`, each next one `stride` weights later.
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalBits:
    """A parameter of this rank as bits in host memory; consecutive rows are read without a copy."""

    dtype: str
    bits: Bits

    @property
    def elements(self) -> int:
        return self.bits.size

    def read(self, offset: int, rows: int, width: int, stride: int) -> Bits:
        if stride == width or rows == 1:
            return self.bits[offset : offset + rows * width]
        step = self.bits.itemsize
        begin = self.bits[offset : offset + (rows - 1) * stride + width]
        shape, strides = (rows, width), (stride * step, step)
        lines = np.lib.stride_tricks.as_strided(begin, shape, strides, writeable=False)
        return np.ascontiguousarray(lines).reshape(-1)


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a checkpoint tensor of `shape`, and its place in this rank's `parameter`.

    Its rows lie `stride` weights apart in the flat parameter, the first at `offset`.
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: str
    block: Block
    offset: int
    stride: int

    @property
    def end(self) -> int:
        """Index after the last weight of the flat parameter that the piece takes."""
        rows = self.block.rows[1] - self.block.rows[0]
        return self.offset + (rows - 1) * self.stride + self.block.width


Pieces: TypeAlias = tuple[Piece, ...]


def rows_of(shape: tuple[int, ...]) -> int:
    """Return the number of rows of a tensor of this shape, its first dimension; 1 for a scalar."""
    return shape[0] if shape else 1


def piece(
    tensor: str,
    shape: tuple[int, ...],
    parameter: str,
    rows: Range,
    columns: Range | None = None,
    offset: int = 0,
    stride: int | None = None,
) -> Pieces:
    """Return the piece of a checkpoint tensor at rows x columns (None: all columns), () if empty.

    `offset`, `stride`: place in the flat parameter; `stride` None: rows follow each other. Raises
    ShardError for a tensor without weights or rows outside of it, TensorFormatError for such
    columns.
    """
    row_elements = prod(shape[1:])
    if not prod(shape):
        raise ShardError(f"{tensor} {shape} has no weights to publish; leave it out")
    columns = (0, row_elements) if columns is None else columns
    if rows[0] >= rows[1] or columns[0] >= columns[1]:
        return ()
    if rows[1] > rows_of(shape):
        raise ShardError(f"{tensor} has shape {shape}: rows {rows} of {parameter} are not in it")
    block = Block(rows, columns, row_elements)
    return (Piece(tensor, shape, parameter, block, offset, stride or block.width),)


def whole(tensor: str, shape: tuple[int, ...], parameter: str, replica: int = 0) -> Pieces:
    """Return the piece of a tensor that this rank holds as a whole; () unless `replica` is 0."""
    return () if replica else piece(tensor, shape, parameter, (0, rows_of(shape)))


def share(size: int, rank: int, ranks: int) -> Range:
    """Return [first, end) of a rank's part of `size`: equal parts, the last ranks' smaller or
    empty."""
    each = -(-size // ranks)
    return min(size, rank * each), min(size, (rank + 1) * each)


def row_shard(tensor: str, shape: tuple[int, ...], parameter: str, rank: int, ranks: int) -> Pieces:
    """Return a rank's piece of a tensor that is sharded by rows, in the order of ranks.

    FSDP, DTensor's Shard(0) and column-parallel layers shard like that.
    """
    return piece(tensor, shape, parameter, share(rows_of(shape), rank, ranks))


def column_shard(
    tensor: str, shape: tuple[int, ...], parameter: str, rank: int, ranks: int
) -> Pieces:
    """Return a rank's piece of a tensor that is sharded by its second dimension, in rank order.

    DTensor's Shard(1) and row-parallel layers shard like that. Raises ShardError for fewer than two
    dimensions.
    """
    if len(shape) < 2:
        raise ShardError(f"{tensor} {shape} has no second dimension to shard")
    inner = prod(shape[2:])
    first, end = share(shape[1], rank, ranks)
    return piece(tensor, shape, parameter, (0, shape[0]), (first * inner, end * inner))


def stacked(parts: Iterable[Pieces], elements: int) -> Pieces:
    """Return the pieces of equal parts that lie one after another in a parameter.

    Each part has `elements` weights, and its pieces are given as if it were a parameter of its own.
    Example: a stack of experts [experts_local, out, in], made of its experts' pieces.
    """
    return tuple(
        replace(found, offset=found.offset + at * elements)
        for at, pieces in enumerate(parts)
        for found in pieces
    )


def first_holders(held: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """Return, for each rank, the positions of its entries that no earlier rank holds."""
    seen: set[Hashable] = set()
    kept: list[list[int]] = []
    for mine in held:
        kept.append([at for at, one in enumerate(mine) if one not in seen])
        seen.update(mine)
    return kept


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a layer: query heads, key/value heads, and weights in a row of a head."""

    query: int
    key_value: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.key_value < 1 or self.query % self.key_value:
            raise ShardError(f"{self.query} query heads do not share {self.key_value} KV heads")


def _even(what: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ShardError(f"{what}: {size} cannot be divided among {ranks} ranks")
    return size // ranks


def gate_up(
    gate: str, up: str, shape: tuple[int, ...], parameter: str, rank: int, ranks: int
) -> Pieces:
    """Return a rank's pieces of Megatron's fused linear_fc1.

    The parameter holds this rank's rows of `gate`, then those of `up`, each a tensor of `shape`.
    Raises ShardError where the rows cannot be divided among the ranks.
    """
    own = _even(gate, rows_of(shape), ranks)
    rows = rank * own, (rank + 1) * own
    halves = (piece(name, shape, parameter, rows) for name in (gate, up))
    return stacked(halves, own * prod(shape[1:]))


def grouped_qkv(
    names: tuple[str, str, str],
    heads: Heads,
    inner: tuple[int, ...],
    parameter: str,
    rank: int,
    ranks: int,
) -> Pieces:
    """Return a rank's pieces of Megatron's fused linear_qkv.

    The parameter holds, for each KV head, its query heads, its key and its value. `names`:
    checkpoint tensors of q, k and v. `inner`: shape of a row, (hidden,) for a weight and () for a
    bias. With fewer KV heads than ranks each KV head is replicated, and the first rank that has it
    publishes it. Raises ShardError where heads cannot be divided.
    """
    if heads.key_value >= ranks:
        groups, copies = _even(parameter, heads.key_value, ranks), 1
    else:
        groups, copies = 1, _even(parameter, ranks, heads.key_value)
    queries = _even(parameter, heads.query // heads.key_value, copies)
    first_kv, copy = rank * groups // copies, rank % copies
    dim, row = heads.head_dim, prod(inner)
    found: list[Pieces] = []
    for group in range(groups):
        kv = first_kv + group
        first_q = (kv * copies + copy) * queries
        parts = [(names[0], heads.query, first_q, queries)]
        parts += [(name, heads.key_value, kv, 1) for name in names[1:]]
        local = group * (queries + 2) * dim * row
        for name, all_heads, head, count in parts:
            if name == names[0] or copy == 0:
                shape = (all_heads * dim, *inner)
                rows = head * dim, (head + count) * dim
                found.append(piece(name, shape, parameter, rows, offset=local))
            local += count * dim * row
    return tuple(one for pieces in found for one in pieces)


def vocabulary(
    tensor: str, shape: tuple[int, ...], parameter: str, local_rows: int, rank: int
) -> Pieces:
    """Return a rank's piece of an embedding whose rows are padded.

    Each rank holds `local_rows` rows; rows beyond `shape` are padding and left out.
    """
    first, end = rank * local_rows, (rank + 1) * local_rows
    return piece(tensor, shape, parameter, (first, min(end, rows_of(shape))))
