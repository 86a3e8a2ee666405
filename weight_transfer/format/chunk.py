"""Chunk: an encoded, immutable, self-describing block of one tensor, named by its BLAKE3.

header (64 bytes, little-endian)
  magic "ROSC" | format u8 | encoding u8 | element width u8 | reserved u8 (0)
  first row u64 | end row u64 | row elements u64 | changed u64
  base digest u64 (of the whole old tensor) | payload bytes u64
  first column u32 | columns u32 (0, 0 where rows are whole)
payload, see `delta_codec`: of the block's weights, row by row
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import blake3

from weight_transfer.errors import ChunkDigestError, ChunkFormatError, WrongBaseError
from weight_transfer.format.delta_codec import (
    Encoding,
    Level,
    decode_dense,
    decode_payload,
    encode_payload,
)
from weight_transfer.format.digest import MODULUS, Block, Range, block_growth
from weight_transfer.format.manifest import ChunkRef, TensorUpdate, hex_digest
from weight_transfer.format.tensors import AnyTensor, Flat, TensorBits, WeightClass
from weight_transfer.kernels.cpu import scatter_and_sum
from weight_transfer.kernels.processor import Change

Item = TypeVar("Item")
Result = TypeVar("Result")
MAGIC = b"ROSC"
FORMAT = 1
HEADER = struct.Struct("<4sBBBBQQQQQQQ")
_COLUMN_BITS = 32
DEFAULT_CHUNK_BYTES = 64 << 20
"""Unencoded bytes of one chunk; larger tensors are cut at row boundaries."""


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Header of a chunk; rows are [first_row, end_row) of its tensor.

    `columns`: [first, end) of each row, None for all of them. `width`: bytes of a weight.
    `changed`: number of changed weights. `base_digest`: digest of the whole old tensor.
    """

    encoding: Encoding
    width: int
    first_row: int
    end_row: int
    row_elements: int
    changed: int
    base_digest: int
    payload_bytes: int
    columns: Range | None = None

    @property
    def block(self) -> Block:
        """Block of the tensor that the chunk covers."""
        columns = (0, self.row_elements) if self.columns is None else self.columns
        return Block((self.first_row, self.end_row), columns, self.row_elements)

    def ref(self, name: str) -> ChunkRef:
        """Return the manifest's entry for this chunk under its name."""
        return ChunkRef(
            id=name,
            rows=(self.first_row, self.end_row),
            codec=self.encoding.name.lower(),
            encoded_bytes=HEADER.size + self.payload_bytes,
            changed=self.changed,
            columns=self.columns,
        )


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A new chunk: its header and its encoded bytes, header included.

    `digest_change`: increase of its tensor's digest, mod 2^64.
    """

    header: ChunkHeader
    encoded: bytes
    digest_change: int


def chunk_id(encoded: bytes) -> str:
    """Return a chunk's name: the BLAKE3 of its encoded bytes, 64 hex digits."""
    return blake3.blake3(encoded).hexdigest()


def check_id(name: str, encoded: bytes) -> None:
    """Raise ChunkDigestError unless `name` is the BLAKE3 of `encoded`."""
    if chunk_id(encoded) != name:
        raise ChunkDigestError(f"chunk {name} is damaged ({len(encoded)} bytes); fetch it again")


def row_ranges(tensor: AnyTensor, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield [first, end) row ranges of at most `chunk_bytes` dense bytes, or of one row if it is
    longer."""
    row_bytes = max(1, tensor.row_elements * tensor.bits.itemsize)
    step = max(1, chunk_bytes // row_bytes)
    for first in range(0, tensor.rows, step):
        yield first, min(tensor.rows, first + step)


def encode_chunk(
    old: AnyTensor,
    new: AnyTensor,
    rows: tuple[int, int],
    base_digest: int,
    level: Level = Level.FAST,
) -> EncodedChunk:
    """Return a chunk of rows [a, b) of the step from `old` to `new`.

    `base_digest`: digest of all of `old`.
    """
    block = Block.of_rows(rows, old.row_elements)
    part = slice(block.first, block.first + block.elements)
    before, after = old.bits[part], new.bits[part]
    return encode_block(before, after, block, old.weight_class, base_digest, level)


def encode_block(
    old: Flat,
    new: Flat,
    block: Block,
    kind: WeightClass,
    base_digest: int,
    level: Level = Level.FAST,
) -> EncodedChunk:
    """Return a chunk of a block's change; `old`, `new` are the block's weights, row by row.

    `base_digest`: digest of the whole old tensor. Raises ChunkFormatError for columns beyond 2^32,
    TensorFormatError for some columns of a tensor on a device.
    """
    if not block.is_whole_rows and block.columns[1] >> _COLUMN_BITS:
        raise ChunkFormatError(f"columns {block.columns} end beyond 2^32; shard by rows instead")
    payload = encode_payload(old, new, kind, level, block.first)
    # The codec takes a range for contiguous, and the digest wants each weight's own index.
    growth = payload.growth if block.is_whole_rows else block_growth(old, new, block)
    header = ChunkHeader(
        encoding=payload.encoding,
        width=old.itemsize,
        first_row=block.rows[0],
        end_row=block.rows[1],
        row_elements=block.row_elements,
        changed=payload.changed,
        base_digest=base_digest,
        payload_bytes=payload.size,
        columns=None if block.is_whole_rows else block.columns,
    )
    return EncodedChunk(header, b"".join((_pack(header), *payload.parts)), growth)


def update_of(
    old: AnyTensor, before: int, chunks: Iterable[EncodedChunk], put: Callable[[bytes], str]
) -> TensorUpdate:
    """Store a tensor's chunks by `put`, which returns their names.

    Return the manifest's entry for it. `before` is the digest of `old`. Chunks are stored as they
    come. Those that change nothing are stored only if others change something: a tensor that did
    not change is listed without chunks.
    """
    after = before
    refs, empty = list[ChunkRef](), list[bytes]()
    for chunk in chunks:
        after += chunk.digest_change
        if chunk.header.changed:
            name = put(chunk.encoded)
        else:
            name = chunk_id(chunk.encoded)
            empty.append(chunk.encoded)
        refs.append(chunk.header.ref(name))
    if len(empty) == len(refs):
        refs = []
    else:
        for encoded in empty:
            put(encoded)
    digests = hex_digest(before), hex_digest(after % MODULUS)
    return TensorUpdate(old.name, old.dtype, old.shape, *digests, tuple(refs))


def encode_nothing(shape: tuple[int, ...], ref: ChunkRef, width: int, base_digest: int) -> bytes:
    """Return the bytes of a chunk that changes nothing, for the block that `ref` lists."""
    header = ChunkHeader(
        encoding=Encoding.EMPTY,
        width=width,
        first_row=ref.rows[0],
        end_row=ref.rows[1],
        row_elements=prod(shape[1:]),
        changed=0,
        base_digest=base_digest,
        payload_bytes=0,
        columns=ref.columns,
    )
    return _pack(header)


def parse_header(encoded: bytes) -> ChunkHeader:
    """Return the header of an untrusted chunk, checked in itself. Raises ChunkFormatError."""
    if len(encoded) < HEADER.size:
        raise ChunkFormatError(f"{len(encoded)} bytes are shorter than a chunk's header")
    magic, form, encoding, width, pad, *numbers, stretch = HEADER.unpack_from(encoded)
    if magic != MAGIC or form != FORMAT or pad:
        raise ChunkFormatError(f"not a chunk of format {FORMAT}; publisher and receiver differ?")
    if encoding not in tuple(Encoding) or width not in (1, 2, 4, 8):
        raise ChunkFormatError(f"unknown encoding {encoding} or element width {width}")
    header = ChunkHeader(Encoding(encoding), width, *[*numbers, _columns(stretch)])
    if len(encoded) != HEADER.size + header.payload_bytes:
        raise ChunkFormatError(f"chunk has {len(encoded)} bytes, its header promises others")
    if header.first_row >= header.end_row:
        raise ChunkFormatError(f"chunk covers no rows: {header.first_row}..{header.end_row}")
    _check_columns(header)
    return header


def _check_columns(header: ChunkHeader) -> None:
    if header.columns is None:
        return
    first, end = header.columns
    some = end - first < header.row_elements  # All columns are written as (0, 0).
    if not (some and first < end <= header.row_elements):
        raise ChunkFormatError(f"chunk covers columns {first}..{end} of {header.row_elements}")


def decode_chunk(encoded: bytes, old: TensorBits, base_digest: int) -> Change:
    """Return the change that an untrusted chunk makes to the tensor it was made for.

    `base_digest` is the digest of `old`, of which nothing is written. Raises ChunkFormatError for
    malformed bytes and WrongBaseError when the chunk was made for other weights.
    """
    header = _header_for(encoded, old, base_digest)
    payload = memoryview(encoded)[HEADER.size :]
    base = header.block.cut(old.bits)
    local = decode_payload(header.encoding, header.changed, payload, base)
    return Change(header.block.flat(local.indices), local.old, local.new)


def overwrite_chunk(encoded: bytes, tensor: TensorBits, base_digest: int) -> int:
    """Write an untrusted chunk's new weights into its tensor.

    Return the increase of the tensor's digest. `base_digest` is the digest before the version. A
    chunk touches its own block alone, so those of one version may be written at the same time.
    Raises like `decode_chunk`; nothing is written then.
    """
    header = _header_for(encoded, tensor, base_digest)
    block = header.block
    if header.encoding is not Encoding.DENSE or not block.is_whole_rows:
        change = decode_chunk(encoded, tensor, base_digest)
        return int(scatter_and_sum(tensor.bits, change.indices, change.new))
    old = block.cut(tensor.bits)
    new = decode_dense(header.changed, memoryview(encoded)[HEADER.size :], old)
    growth = block_growth(old, new, block)
    old[:] = new
    return growth


def _header_for(encoded: bytes, old: TensorBits, base_digest: int) -> ChunkHeader:
    header = parse_header(encoded)
    if header.width != old.bits.itemsize or header.row_elements != old.row_elements:
        raise ChunkFormatError(f"chunk is not of a tensor like {old.name} {old.shape}")
    if header.end_row > old.rows:
        raise ChunkFormatError(f"chunk ends at row {header.end_row}, {old.name} at {old.rows}")
    if header.base_digest != base_digest:
        raise WrongBaseError(f"chunk of {old.name} was made for other weights; rebase first")
    return header


def _columns(stretch: int) -> Range | None:
    first, count = stretch & ((1 << _COLUMN_BITS) - 1), stretch >> _COLUMN_BITS
    return (first, first + count) if stretch else None


def _pack(header: ChunkHeader) -> bytes:
    first, end = header.columns or (0, 0)
    return HEADER.pack(
        MAGIC,
        FORMAT,
        header.encoding,
        header.width,
        0,
        header.first_row,
        header.end_row,
        header.row_elements,
        header.changed,
        header.base_digest,
        header.payload_bytes,
        (end - first) << _COLUMN_BITS | first,
    )


def in_order(
    pool: Executor, threads: int, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Yield work(item) of each item, in order; `threads` + 1 items at most are in work at once.

    The bound keeps few chunks in memory.
    """
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) > threads:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
