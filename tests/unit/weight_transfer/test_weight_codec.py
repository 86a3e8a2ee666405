import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_cases import stepped, steps, tensor

from weight_transfer.format.chunk import HEADER, decode_chunk, encode_chunk, row_ranges
from weight_transfer.format.delta_codec import PLANE_HEADER, Encoding, Level
from weight_transfer.format.digest import digest_of
from weight_transfer.format.tensors import Bits, TensorBits
from weight_transfer.kernels.cpu import apply_changes


def carried(old: TensorBits, new: TensorBits, chunk_bytes: int, level: Level = Level.FAST) -> Bits:
    digest, bits = digest_of(old.bits), old.bits.copy()
    for rows in row_ranges(old, chunk_bytes):
        encoded = encode_chunk(old, new, rows, digest, level).encoded
        change = decode_chunk(encoded, old, digest)
        bits[change.indices] = change.new
    return bits


@given(steps(), st.sampled_from([1, 64, 1 << 20]), st.sampled_from(Level))
def test_every_bit_arrives_signed_zeros_and_nan_payloads_included(
    step: tuple[TensorBits, TensorBits], chunk_bytes: int, level: Level
) -> None:
    old, new = step
    np.testing.assert_array_equal(carried(old, new, chunk_bytes, level), new.bits)


@given(steps(), st.sampled_from([1, 64, 1 << 20]), st.sampled_from(Level))
def test_the_digest_grows_by_what_the_chunks_say(
    step: tuple[TensorBits, TensorBits], chunk_bytes: int, level: Level
) -> None:
    old, new = step
    chunks = [encode_chunk(old, new, rows, 0, level) for rows in row_ranges(old, chunk_bytes)]
    grown = digest_of(old.bits) + sum(chunk.digest_change for chunk in chunks)
    assert grown % (1 << 64) == digest_of(new.bits)


@given(steps())
def test_only_changed_elements_are_staged(step: tuple[TensorBits, TensorBits]) -> None:
    old, new = step
    encoded = encode_chunk(old, new, (0, old.rows), 0).encoded
    change = decode_chunk(encoded, old, 0)
    np.testing.assert_array_equal(change.indices, np.flatnonzero(old.bits != new.bits))
    np.testing.assert_array_equal(change.new, new.bits[change.indices])


@given(steps())
def test_a_chunk_is_never_above_raw_by_more_than_a_header(
    step: tuple[TensorBits, TensorBits],
) -> None:
    old, new = step
    encoded = encode_chunk(old, new, (0, old.rows), 0).encoded
    overhead = HEADER.size + old.bits.itemsize * PLANE_HEADER.size
    # Below the size of a plane's header the gaps may win; they are still smaller than dense.
    assert len(encoded) <= old.bits.nbytes * 1.001 + overhead


@pytest.mark.parametrize(
    ("density", "encoding", "bytes_per_change"),
    [
        (0.0, Encoding.EMPTY, 0),
        (0.02, Encoding.SPARSE, 1.5),
        (0.6, Encoding.BITMAP, 0.8),
    ],
)
def test_the_smallest_encoding_is_taken(
    density: float, encoding: Encoding, bytes_per_change: float
) -> None:
    old = tensor("w", (256, 256), seed=1)
    chunk = encode_chunk(old, stepped(old, 2, density), (0, 256), 0)
    assert chunk.header.encoding is encoding
    assert len(chunk.encoded) <= HEADER.size + 40 + bytes_per_change * chunk.header.changed


def test_unrelated_weights_go_dense() -> None:
    old, new = tensor("w", (256, 256), seed=1), tensor("w", (256, 256), seed=2)
    chunk = encode_chunk(old, new, (0, 256), 0)
    assert chunk.header.encoding is Encoding.DENSE
    assert len(chunk.encoded) <= old.bits.nbytes * 1.001 + HEADER.size + 2 * PLANE_HEADER.size


def test_ranges_are_row_aligned_and_bounded() -> None:
    old = tensor("w", (10, 100), seed=1)
    assert list(row_ranges(old, 601)) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert list(row_ranges(old, 1)) == [(row, row + 1) for row in range(10)]
    assert list(row_ranges(tensor("s", (), seed=1), 1)) == [(0, 1)]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("gaps", "codes", "what"),
    [
        ([0, 98, 0], [1, 1, 1], "outside"),
        ([0xFFFFFFFF], [1], "outside"),
        ([3, 4], [1, 0], "nothing"),
        ([0, 99, 0], [1, 0, 0], "outside"),
        ([0, 5, 99], [1, 0, 1], "outside"),
    ],
)
def test_changes_that_no_encoder_lists_are_refused(
    width: int, gaps: list[int], codes: list[int], what: str
) -> None:
    old = np.zeros(100, f"<u{width}")
    with pytest.raises(ValueError, match=what):
        apply_changes(old, np.array(gaps, "<u4"), np.array(codes, old.dtype))
