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
    """A parameter of this rank, seen flat."""

    @property
    def dtype(self) -> str:
        """Type in which the weights are published."""
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
    """A block of a checkpoint tensor of `shape`, and where local `parameter` holds it."""

    tensor: str
    shape: tuple[int, ...]
    parameter: str
    block: Block
    offset: int
    stride: int

    @property
    def end(self) -> int:
        """Local weights up to which it reaches."""
        rows = self.block.rows[1] - self.block.rows[0]
        return self.offset + (rows - 1) * self.stride + self.block.width


Pieces: TypeAlias = tuple[Piece, ...]


def rows_of(shape: tuple[int, ...]) -> int:
    """Rows of a tensor; a scalar is one row."""
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
    """Return the piece that fills rows x columns (None: all), or () where they are none.

    `stride` None: its rows follow each other in the parameter. Raises ShardError.
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
    """A tensor that this rank holds all of; of replicas, number 0 publishes it."""
    return () if replica else piece(tensor, shape, parameter, (0, rows_of(shape)))


def share(size: int, rank: int, ranks: int) -> Range:
    """Return the part of `size` that belongs to a rank: equal parts, the last ones less or none."""
    each = -(-size // ranks)
    return min(size, rank * each), min(size, (rank + 1) * each)


def row_shard(tensor: str, shape: tuple[int, ...], parameter: str, rank: int, ranks: int) -> Pieces:
    """Rows in order of ranks: FSDP's and DTensor's Shard(0), column-parallel layers."""
    return piece(tensor, shape, parameter, share(rows_of(shape), rank, ranks))


def column_shard(
    tensor: str, shape: tuple[int, ...], parameter: str, rank: int, ranks: int
) -> Pieces:
    """The second dimension in order of ranks: DTensor's Shard(1), row-parallel layers."""
    if len(shape) < 2:
        raise ShardError(f"{tensor} {shape} has no second dimension to shard")
    inner = prod(shape[2:])
    first, end = share(shape[1], rank, ranks)
    return piece(tensor, shape, parameter, (0, shape[0]), (first * inner, end * inner))


def stacked(parts: Iterable[Pieces], elements: int) -> Pieces:
    """Pieces of equal parts that a parameter holds one after another, `elements` weights each.

    So a stack of experts [experts_local, out, in] is made of its experts' pieces, each as if the
    expert were a parameter of its own.
    """
    return tuple(
        replace(found, offset=found.offset + at * elements)
        for at, pieces in enumerate(parts)
        for found in pieces
    )


def first_holders(held: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """Return, for each rank, the positions of the entries that no rank before it holds."""
    seen: set[Hashable] = set()
    kept: list[list[int]] = []
    for mine in held:
        kept.append([at for at, one in enumerate(mine) if one not in seen])
        seen.update(mine)
    return kept


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of a layer: query heads, key/value heads (groups), weights of a head's rows."""

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
    """A fused linear_fc1: this rank's rows of `gate`, then those of `up`, each of `shape`."""
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
    """A fused linear_qkv: for each KV head its query heads, its key and its value.

    `names`: of q, k and v. `inner`: shape of a row, (hidden,) of a weight and () of a bias. With
    fewer KV heads than ranks each is replicated, and the first rank that has it publishes it.
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
    """An embedding whose rows are padded: `local_rows` of them here, none beyond `shape` counts."""
    first, end = rank * local_rows, (rank + 1) * local_rows
    return piece(tensor, shape, parameter, (first, min(end, rows_of(shape))))
