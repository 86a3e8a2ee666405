"""What a rank holds of the version that was published last, cut into what becomes chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weight_transfer.blocks import Block
from weight_transfer.errors import ShardError
from weight_transfer.local import LocalTensor
from weight_transfer.shards import Piece
from weight_transfer.tensors import WIDTHS, Bits, unsigned


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A block of a piece; `bits` are its weights, row by row and the rank's own copy."""

    piece: Piece
    dtype: str
    block: Block
    bits: Bits

    @property
    def tensor(self) -> str:
        """The checkpoint tensor that it is of."""
        return self.piece.tensor

    def read(self, weights: Mapping[str, LocalTensor]) -> Bits:
        """The same weights as the trainer has them now."""
        return _read(self.piece, self.block, weights)


def hold(
    pieces: Sequence[Piece], weights: Mapping[str, LocalTensor], chunk_bytes: int
) -> tuple[HeldPart, ...]:
    """Copy the pieces out of `weights`, part by part. Raises ShardError where they do not fit."""
    check_fit(pieces, weights)
    return tuple(part for piece in pieces for part in _parts(piece, weights, chunk_bytes))


def check_fit(pieces: Sequence[Piece], weights: Mapping[str, LocalTensor]) -> None:
    """Raise ShardError unless each piece lies inside its parameter."""
    for piece in pieces:
        found = weights.get(piece.parameter)
        if found is None:
            raise ShardError(f"{piece.tensor}: this rank has no parameter {piece.parameter}")
        if found.dtype not in WIDTHS:
            raise ShardError(f"{piece.parameter}: dtype {found.dtype} is not carried")
        if piece.offset < 0 or piece.end > found.elements:
            raise ShardError(
                f"{piece.tensor}: {piece.parameter} has {found.elements} weights here, its piece"
                f" takes {piece.offset}..{piece.end}; is it sharded in another way?"
            )


def _parts(
    piece: Piece, weights: Mapping[str, LocalTensor], chunk_bytes: int
) -> Iterator[HeldPart]:
    dtype = weights[piece.parameter].dtype
    for block in piece.block.parts(chunk_bytes // WIDTHS[dtype]):
        bits = _read(piece, block, weights)
        assert bits.size == block.elements
        assert bits.dtype == unsigned(WIDTHS[dtype])
        yield HeldPart(piece, dtype, block, bits.copy())


def _read(piece: Piece, block: Block, weights: Mapping[str, LocalTensor]) -> Bits:
    rows = block.rows[1] - block.rows[0]
    offset = piece.offset + (block.rows[0] - piece.block.rows[0]) * piece.stride
    return weights[piece.parameter].read(offset, rows, block.width, piece.stride)
