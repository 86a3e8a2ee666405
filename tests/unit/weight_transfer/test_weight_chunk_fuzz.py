"""Whatever bytes arrive: an error of ours or a change inside the rows, nothing else."""

import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from weight_cases import stepped, steps, tensor

from weight_transfer.errors import ChunkFormatError, WeightError, WrongBaseError
from weight_transfer.format.chunk import HEADER, decode_chunk, encode_chunk
from weight_transfer.format.delta_codec import PLANE_HEADER, Level
from weight_transfer.format.tensors import TensorBits

OLD = tensor("w", (64, 64), seed=1)


LEVELS = (Level.FAST, Level.COMPACT)
"""Levels for encoded_step: 0.02 stands for the compact one."""


def encoded_step(density: float) -> bytes:
    return encode_chunk(
        OLD, stepped(OLD, 2, density), (0, OLD.rows), 7, LEVELS[density == 0.02]
    ).encoded


def decode_or_refuse(encoded: bytes, old: TensorBits = OLD, digest: int = 7) -> None:
    try:
        change = decode_chunk(encoded, old, digest)
    except WeightError:
        return
    assert change.indices.size == change.new.size <= old.bits.size
    if change.indices.size:
        assert change.indices.min() >= 0
        assert change.indices.max() < old.bits.size


@pytest.mark.parametrize("density", [0.0, 0.01, 0.02, 0.3, 1.0])
def test_every_truncation_is_refused(density: float) -> None:
    encoded = encoded_step(density)
    for length in {*range(min(len(encoded), 200)), *range(0, len(encoded), 37)}:
        with pytest.raises(ChunkFormatError):
            decode_chunk(encoded[:length], OLD, 7)
    with pytest.raises(ChunkFormatError):
        decode_chunk(encoded + b"\0", OLD, 7)


@given(st.sampled_from([0.0, 0.01, 0.02, 0.3, 1.0]), st.data())
def test_flipped_bytes_never_escape(density: float, data: st.DataObject) -> None:
    encoded = bytearray(encoded_step(density))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(encoded) - 1, 300)))
        encoded[at] ^= data.draw(st.integers(1, 255))
    decode_or_refuse(bytes(encoded))


@given(st.binary(max_size=300), st.integers(0, 4), st.integers(0, 1 << 64), steps())
def test_arbitrary_payloads_never_escape(
    payload: bytes, encoding: int, changed: int, step: tuple[TensorBits, TensorBits]
) -> None:
    old, _ = step
    changed = min(changed, (1 << 64) - 1)
    size = old.row_elements
    width = old.bits.itemsize
    fields = (b"ROSC", 1, encoding, width, 0, 0, old.rows, size, changed, 7, len(payload), 0)
    decode_or_refuse(HEADER.pack(*fields) + payload, old)


def sparse_with_plane(tag: int, body: bytes, changed: int = 64, rest: bytes = b"") -> bytes:
    payload = bytes([1]) + PLANE_HEADER.pack(tag, len(body)) + body + rest
    fields = (b"ROSC", 1, 1, 2, 0, 0, 64, 64, changed, 7, len(payload), 0)
    return HEADER.pack(*fields) + payload


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.ZstdCompressor().compress(b"\0" * (1 << 24)),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * (1 << 24)),
        zstandard.ZstdCompressor().compress(b"\0" * 64) + b"more",
        struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 62),
    ],
    ids=["bomb", "no size claimed", "trailing bytes", "exabytes claimed"],
)
def test_a_compressed_plane_must_claim_exactly_its_size(frame: bytes) -> None:
    with pytest.raises(ChunkFormatError):
        decode_chunk(sparse_with_plane(1, frame), OLD, 7)


def test_more_changes_than_rows_are_refused() -> None:
    with pytest.raises(ChunkFormatError):
        decode_chunk(sparse_with_plane(0, b"", changed=1 << 62), OLD, 7)


def test_gaps_that_leave_the_rows_are_refused() -> None:
    ones = PLANE_HEADER.pack(2, 1) + b"\x01"
    decode_chunk(sparse_with_plane(0, b"\x03" * 64, rest=2 * ones), OLD, 7)
    with pytest.raises(ChunkFormatError, match="outside"):
        decode_chunk(sparse_with_plane(0, b"\xff" * 64, rest=2 * ones), OLD, 7)


def test_a_chunk_for_other_weights_or_another_tensor_is_refused() -> None:
    with pytest.raises(WrongBaseError):
        decode_chunk(encoded_step(0.3), OLD, 8)
    with pytest.raises(ChunkFormatError):
        decode_chunk(encoded_step(0.3), tensor("v", (64, 32), seed=1), 7)
    with pytest.raises(ChunkFormatError):
        decode_chunk(encoded_step(0.3), tensor("v", (32, 64), seed=1), 7)
