"""Pieces of Megatron's fused and padded parameters, for tensor-parallel rank `rank` of `ranks`.

Its plain layers need nothing of their own: column-parallel ones are `row_shard`, row-parallel ones
`column_shard`, norms `whole` with the rank as the replica's number.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from weight_transfer.errors import ShardError
from weight_transfer.shards import Pieces, piece, rows_of, stacked


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
