"""Chunks carry every bit; whatever bytes arrive are a change inside the rows or an error of ours.

The wire format is pinned: chunks and a manifest written once must stay readable for ever.
`golden/wire.json` holds chunks of format 1 and a manifest of format 2. Chunks are decoded only
where zstd shaped them (its output may change between releases), and compared byte for byte where
all planes are raw.
"""

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bench.weights.codec import adam_step, rate_for
from tests.unit.weight_transfer.weight_cases import KINDS, stepped, steps, tensor
from weight_transfer.errors import ChunkFormatError, WeightError, WrongBaseError
from weight_transfer.format import entropy as compact_module
from weight_transfer.format.chunk import (
    HEADER,
    chunk_id,
    decode_chunk,
    encode_chunk,
    overwrite_chunk,
    parse_header,
    row_ranges,
)
from weight_transfer.format.delta_codec import PLANE_HEADER, Encoding, Level, decode_payload
from weight_transfer.format.digest import digest_of, updated
from weight_transfer.format.entropy import decode_compact, encode_compact, join, split
from weight_transfer.format.manifest import Manifest
from weight_transfer.format.signing import SigningKey, VerifyKey
from weight_transfer.format.tensors import WIDTHS, Bits, TensorBits, WeightClass, weight_class_of
from weight_transfer.kernels import cpu, range_coder
from weight_transfer.kernels.cpu import apply_changes


@given(steps(), st.sampled_from([1, 64, 1 << 20]), st.sampled_from(Level))
def test_every_bit_arrives_signed_zeros_and_nan_payloads_included(
    step: tuple[TensorBits, TensorBits], chunk_bytes: int, level: Level
) -> None:
    old, new = step
    digest, bits = digest_of(old.bits), old.bits.copy()
    grown = digest
    for rows in row_ranges(old, chunk_bytes):
        chunk = encode_chunk(old, new, rows, digest, level)
        change = decode_chunk(chunk.encoded, old, digest)
        bits[change.indices] = change.new
        grown += chunk.digest_change
    np.testing.assert_array_equal(bits, new.bits)
    assert grown % (1 << 64) == digest_of(new.bits)


@given(steps())
def test_a_chunk_stages_changed_elements_only_and_is_hardly_above_raw(
    step: tuple[TensorBits, TensorBits],
) -> None:
    old, new = step
    encoded = encode_chunk(old, new, (0, old.rows), 0).encoded
    change = decode_chunk(encoded, old, 0)
    np.testing.assert_array_equal(change.indices, np.flatnonzero(old.bits != new.bits))
    np.testing.assert_array_equal(change.new, new.bits[change.indices])
    overhead = HEADER.size + old.bits.itemsize * PLANE_HEADER.size
    # Below the size of a plane's header the gaps may win; they are still smaller than dense.
    assert len(encoded) <= old.bits.nbytes * 1.001 + overhead


@pytest.mark.parametrize(
    ("density", "encoding", "bytes_per_change"),
    [(0.0, Encoding.EMPTY, 0), (0.02, Encoding.SPARSE, 1.5), (0.6, Encoding.BITMAP, 0.8)],
)
def test_the_smallest_encoding_is_taken(
    density: float, encoding: Encoding, bytes_per_change: float
) -> None:
    old = tensor("w", (256, 256), seed=1)
    chunk = encode_chunk(old, stepped(old, 2, density), (0, 256), 0)
    assert chunk.header.encoding is encoding
    assert len(chunk.encoded) <= HEADER.size + 40 + bytes_per_change * chunk.header.changed
    unrelated = encode_chunk(old, tensor("w", (256, 256), seed=2), (0, 256), 0)
    assert unrelated.header.encoding is Encoding.DENSE
    assert len(unrelated.encoded) <= old.bits.nbytes * 1.001 + HEADER.size + 2 * PLANE_HEADER.size


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


OLD = tensor("w", (64, 64), seed=1)


def encoded_step(density: float) -> bytes:
    level = Level.COMPACT if density == 0.02 else Level.FAST
    return encode_chunk(OLD, stepped(OLD, 2, density), (0, OLD.rows), 7, level).encoded


def decode_or_refuse(encoded: bytes, old: TensorBits = OLD, digest: int = 7) -> None:
    try:
        change = decode_chunk(encoded, old, digest)
    except WeightError:
        return
    assert change.indices.size == change.new.size <= old.bits.size
    header = parse_header(encoded)
    assert change.indices.size == header.changed or header.encoding.field
    if change.indices.size:
        assert change.indices.min() >= 0
        assert change.indices.max() < old.bits.size
        assert (np.diff(change.indices) > 0).all()


@pytest.mark.parametrize("density", [0.0, 0.01, 0.02, 0.3, 1.0])
def test_every_truncation_is_refused(density: float) -> None:
    encoded = encoded_step(density)
    for length in {*range(min(len(encoded), 200)), *range(0, len(encoded), 37)}:
        with pytest.raises(ChunkFormatError):
            decode_chunk(encoded[:length], OLD, 7)
    with pytest.raises(ChunkFormatError):
        decode_chunk(encoded + b"\0", OLD, 7)


STEP = adam_step(32, 64, rate_for(0.1), seed=2)


@given(st.sampled_from([0.0, 0.01, 0.02, 0.3, 1.0]), st.data())
def test_flipped_bytes_never_escape(density: float, data: st.DataObject) -> None:
    trained = encode_chunk(STEP.old, STEP.new, (0, 32), 7, Level.COMPACT)
    assert trained.header.encoding is Encoding.COMPACT
    for old, whole, first in ((OLD, encoded_step(density), 0), (STEP.old, trained.encoded, 64)):
        encoded = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(first, min(len(encoded) - 1, first + 300)))
            encoded[at] ^= data.draw(st.integers(1, 255))
        decode_or_refuse(bytes(encoded), old)


@given(st.binary(max_size=300), st.sampled_from(Encoding), st.integers(0, 1 << 64), steps())
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
    "damaged",
    [
        sparse_with_plane(1, zstandard.ZstdCompressor().compress(b"\0" * (1 << 24))),
        sparse_with_plane(
            1, zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * (1 << 24))
        ),
        sparse_with_plane(1, zstandard.ZstdCompressor().compress(b"\0" * 64) + b"more"),
        sparse_with_plane(1, struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 62)),
        sparse_with_plane(0, b"", changed=1 << 62),
        sparse_with_plane(9, b"\x03" * 64),
        sparse_with_plane(0, b"\x03" * 63),
    ],
    ids=[
        *("bomb", "no size claimed", "trailing bytes", "exabytes claimed", "more than rows"),
        *("unknown tag", "a byte too few"),
    ],
)
def test_a_plane_that_is_not_exactly_its_size_is_refused(damaged: bytes) -> None:
    with pytest.raises(ChunkFormatError):
        decode_chunk(damaged, OLD, 7)


def test_gaps_that_leave_the_rows_are_refused() -> None:
    ones = PLANE_HEADER.pack(2, 1) + b"\x01"
    decode_chunk(sparse_with_plane(0, b"\x03" * 64, rest=2 * ones), OLD, 7)
    with pytest.raises(ChunkFormatError, match="outside"):
        decode_chunk(sparse_with_plane(0, b"\xff" * 64, rest=2 * ones), OLD, 7)


def test_a_chunk_for_other_weights_or_another_tensor_is_refused() -> None:
    with pytest.raises(WrongBaseError):
        decode_chunk(encoded_step(0.3), OLD, 8)
    for shape in ((64, 32), (32, 64)):
        with pytest.raises(ChunkFormatError):
            decode_chunk(encoded_step(0.3), tensor("v", shape, seed=1), 7)


@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([1, 2, 63, 65_535, 65_536, 70_001]),
    st.sampled_from([1e-5, 1e-3, 0.02, 0.2]),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_change_of_any_width_comes_back(
    width: int, size: int, density: float, anything: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    top = 1 << (8 * width)
    old = rng.integers(0, top, size, dtype=f"<u{width}")
    step = rng.integers(1, top if anything else min(top, 5), size, dtype=f"<u{width}")
    moved = rng.random(size) < density
    moved[rng.integers(0, size)] = True
    new = np.where(moved, old + step, old)
    found = cpu.compare(old, new, size, 0)
    assert found is not None
    payload = encode_compact(found, KINDS[width])
    change = decode_compact(memoryview(payload), found.count, old)
    np.testing.assert_array_equal(change.indices, np.flatnonzero(old != new))
    np.testing.assert_array_equal(change.old, old[change.indices])
    np.testing.assert_array_equal(change.new, new[change.indices])


@pytest.mark.parametrize(
    ("density", "fast", "compact"), [(0.019, 1.25, 0.86), (0.046, 1.10, 0.77), (0.119, 0.94, 0.68)]
)
def test_a_training_step_takes_no_more_bytes_than_promised(
    density: float, fast: float, compact: float
) -> None:
    step = adam_step(1024, 2048, rate_for(density), seed=1)
    for level, most in ((Level.FAST, fast), (Level.COMPACT, compact)):
        chunk = encode_chunk(step.old, step.new, (0, step.old.rows), 0, level)
        assert len(chunk.encoded) <= most * chunk.header.changed
    assert chunk.header.encoding is Encoding.COMPACT


def information_bytes(old: Bits, new: Bits) -> float:
    """Bytes of which weights differ, if each does by itself, and of a coin for each change."""
    share = float(np.mean(old != new))
    bits = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    return float(old.size * (bits + share) / 8)


@pytest.mark.parametrize("dtype", sorted(set(WIDTHS)))
def test_an_update_of_any_dtype_is_at_the_information_bound(dtype: str) -> None:
    """Weights of 4 and 6 bits count as weights, also where integers hold two of them."""
    kind = weight_class_of(dtype)
    field = kind.field or (4 if dtype in ("uint8", "int32") else 0)
    rng = np.random.default_rng(1)
    bits = tensor("w", (240, 1_000), 1, dtype).bits
    if dtype == "bool":
        bits &= 1
    weights = split(bits, field) if field else bits
    if kind.bits > 4:  # A layer's weights are of few magnitudes.
        magnitudes = np.minimum(rng.geometric(0.5, weights.size), 12).astype(weights.dtype)
        weights &= ~weights.dtype.type(kind.mask << kind.shift)
        weights |= (100 - magnitudes) << weights.dtype.type(kind.shift)
    steps = rng.choice(np.array([1, -1]), weights.size).astype(f"i{weights.itemsize}")
    if field in (4, 6):  # The least and the greatest have one neighbour.
        steps = np.where(weights == 0, 1, np.where(weights == (1 << field) - 1, -1, steps))
    moved = weights + steps.astype(f"i{weights.itemsize}").view(weights.dtype)
    if dtype == "bool":
        moved = weights ^ 1
    moved = np.where(rng.random(weights.size) < 0.03, moved, weights)
    new_bits = join(moved, field, bits.dtype) if field else moved
    before, after = (TensorBits("w", dtype, (240, 1_000), each) for each in (bits, new_bits))
    digest = digest_of(bits)
    chunk = encode_chunk(before, after, (0, 240), digest, Level.COMPACT)
    assert chunk.header.encoding.field == field
    least = information_bytes(weights, moved)
    # The direction in which a truth value changed is no news, and is coded all the same.
    ratio = len(chunk.encoded) / least
    assert ratio <= (1.15 if dtype == "bool" else 1.05), f"{ratio:.3f} of the bound"
    change = decode_chunk(chunk.encoded, before, digest)
    np.testing.assert_array_equal(change.indices, np.flatnonzero(bits != new_bits))
    np.testing.assert_array_equal(change.new, new_bits[change.indices])
    assert (digest + chunk.digest_change) % (1 << 64) == digest_of(new_bits)
    written = before.zeros()
    written.bits[:] = bits
    overwrite_chunk(chunk.encoded, written, digest)
    np.testing.assert_array_equal(written.bits, new_bits)


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float6_e2m3fn", "complex64", "uint8"])
@pytest.mark.parametrize("size", [1, 2, 3, 12, 3_001])
def test_weights_that_share_elements_come_back_however_many_change(dtype: str, size: int) -> None:
    old = tensor("w", (size,), 1, dtype)
    for seed, share in enumerate((0.01, 0.1, 0.2, 0.6, 1.0)):
        rng = np.random.default_rng(seed)
        flips = tensor("w", (size,), 2 + seed, dtype).bits
        bits = np.where(rng.random(size) < share, old.bits ^ flips, old.bits)
        bits[size // 2] ^= bits.dtype.type(1)
        new = TensorBits("w", dtype, (size,), bits)
        for level in Level:
            encoded = encode_chunk(old, new, (0, size), 7, level).encoded
            change = decode_chunk(encoded, old, 7)
            np.testing.assert_array_equal(change.indices, np.flatnonzero(old.bits != bits))
            np.testing.assert_array_equal(change.new, bits[change.indices])


def test_a_weight_of_more_bits_than_its_field_is_refused() -> None:
    old = tensor("w", (12,), 1, "float4_e2m1fn_x2")
    parts = split(old.bits, 4)
    wide = cpu.compare(parts, parts | np.uint8(16), parts.size)
    assert wide is not None
    payload = memoryview(encode_compact(wide, WeightClass(1, 2)))
    with pytest.raises(ChunkFormatError, match="a weight has more than 4 bits"):
        decode_payload(Encoding.COMPACT4, parts.size, payload, old.bits)


def test_an_empty_class_and_a_full_one_cost_next_to_nothing() -> None:
    old = np.concatenate([np.full(40_000, 0x3C00, "<u2"), np.full(40_000, 0x4000, "<u2")])
    new = old.copy()
    new[:9_000] += 1
    found = cpu.compare(old, new, old.size, 0)
    assert found is not None
    payload = encode_compact(found, KINDS[2])
    assert len(payload) < 9_000 / 8 * 1.5, "a bit for each sign and next to nothing for places"
    change = decode_compact(memoryview(payload), found.count, old)
    np.testing.assert_array_equal(change.new, new[:9_000])
    np.testing.assert_array_equal(change.indices, np.arange(9_000))


def test_a_compact_payload_that_contradicts_its_head_is_refused() -> None:
    found = cpu.compare(STEP.old.bits, STEP.new.bits, STEP.old.bits.size, 0)
    assert found is not None
    payload = encode_compact(found, KINDS[2])
    rice = compact_module._HEAD.size + 1
    for wrong, words in (
        (payload[:3], "ends in its head"),
        (payload + b"\0", "another length"),
        (payload[:rice] + b"\xff" + payload[rice + 1 :], "a class that cannot be"),
    ):
        with pytest.raises(ChunkFormatError, match=words):
            decode_compact(memoryview(wrong), found.count, STEP.old.bits)


@pytest.mark.parametrize("changed", [2, 40])
def test_gaps_that_together_pass_the_end_are_refused_at_once(changed: int) -> None:
    """Each gap may be as long as the weights, not all together: work is bounded by what is there.

    The second gap already ends it, whatever the others would say: its unary part is never read.
    """
    size = 1 << 16
    old = np.full(size, 0x3F80, "<u2")
    gaps = np.full(changed, size - 1, np.uint32)
    codes = np.full(changed, 2, np.uint16)
    coded, raw = compact_module._entropy_coded(gaps, codes, [slice(0, changed)], [0])
    kind = 0x3F80 >> 7
    payload = b"".join(
        (
            compact_module._HEAD.pack(7, 8, kind, kind, 1, coded.size, raw.size),
            compact_module._CLASS.pack(kind, 0, changed),
            coded.tobytes(),
            raw.tobytes(),
        )
    )
    state, bits = np.zeros(5, np.int64), np.zeros(3, np.int64)
    range_coder.begin(state, coded)
    odds, seen = range_coder.contexts(range_coder.CONTEXTS)
    out = np.zeros(changed, np.uint32), np.zeros(changed, np.uint16)
    wrong = range_coder.decode_class(*out, 0, size, state, coded, bits, raw, odds, seen)
    assert wrong == range_coder.WRONG
    assert np.count_nonzero(out[0]) <= 2, "nothing after the gap that passes the end is decoded"
    with pytest.raises(ChunkFormatError, match="a gap or a change that cannot be"):
        decode_compact(memoryview(payload), changed, old)


@given(steps())
def test_updating_equals_recomputing(step: tuple[TensorBits, TensorBits]) -> None:
    old, new = step
    indices = np.flatnonzero(old.bits != new.bits)
    after = updated(digest_of(old.bits), indices, old.bits[indices], new.bits[indices])
    assert after == digest_of(new.bits)


@given(st.lists(st.integers(0, 0xFFFF), min_size=2, max_size=50, unique=True), st.randoms())
def test_a_permutation_has_another_digest(values: list[int], random: Random) -> None:
    shuffled = values.copy()
    random.shuffle(shuffled)
    same = digest_of(np.array(values, "<u2")) == digest_of(np.array(shuffled, "<u2"))
    assert same == (values == shuffled)


def test_blocks_do_not_show() -> None:
    bits = np.arange(600_000, dtype="<u4")
    indices = np.arange(bits.size)
    assert digest_of(bits) == updated(digest_of(np.zeros_like(bits)), indices, bits * 0, bits)


def test_the_digest_is_pinned() -> None:
    assert digest_of(np.array([1, 2, 3, 0x8000], dtype="<u2")) == 0x459FACAAB954CBB2
    assert digest_of(np.zeros(0, dtype="<u2")) == 0


GOLDEN = json.loads((Path(__file__).parent / "golden" / "wire.json").read_text())


def tensor_like(shape: list[int], bits: list[int]) -> TensorBits:
    return TensorBits("w", "bfloat16", tuple(shape), np.array(bits, dtype="<u2"))


def scrambled(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights that look random, by arithmetic alone; some small ones go up or down by one."""
    mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    old = (0x3B00 + mixed % 512).astype("<u2")
    moves = (old < 0x3C00) & ((mixed >> np.uint64(40)) % 8 == 0)
    step = np.where((mixed >> np.uint64(50)) % 2 == 0, 1, -1)
    return old, np.where(moves, old + step, old).astype("<u2")


@pytest.mark.parametrize("case", GOLDEN["chunks"], ids=lambda case: case["name"])
def test_golden_chunks_decode(case: dict[str, Any]) -> None:
    old, new = (tensor_like(case["shape"], case[which]) for which in ("old", "new"))
    encoded = bytes.fromhex(case["encoded"])
    assert chunk_id(encoded) == case["id"]
    change = decode_chunk(encoded, old, case["base_digest"])
    bits = old.bits.copy()
    bits[change.indices] = change.new
    np.testing.assert_array_equal(bits, new.bits)
    if case["raw"]:
        level = Level(case.get("level", "fast"))
        assert encode_chunk(old, new, (0, old.rows), case["base_digest"], level).encoded == encoded


def test_a_large_compact_chunk_is_pinned() -> None:
    """No zstd shapes it: only its name is kept here."""
    old, new = scrambled(80_000)
    before, after = (TensorBits("w", "bfloat16", (800, 100), bits) for bits in (old, new))
    encoded = encode_chunk(before, after, (0, 800), 7, Level.COMPACT).encoded
    assert encoded[5] == Encoding.COMPACT
    assert chunk_id(encoded) == GOLDEN["large_compact"]


def test_golden_manifest_is_written_and_read_alike_and_its_signature_holds() -> None:
    golden = GOLDEN["manifest"]
    lines = "".join(f"{line}\n" for line in golden["lines"])
    raw = bytes.fromhex(golden["head"]) + lines.encode()
    manifest = Manifest.from_bytes(raw, VerifyKey(GOLDEN["verify_key"]))
    assert manifest.to_bytes() == raw
    assert SigningKey.from_hex("07" * 32).verify_key.hex == GOLDEN["verify_key"]
