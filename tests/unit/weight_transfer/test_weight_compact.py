"""The compact encoding: exact for all that may change, small for what training changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.weights.codec import adam_step, rate_for
from weight_transfer.errors import ChunkFormatError
from weight_transfer.format import entropy as compact_module
from weight_transfer.format.chunk import decode_chunk, encode_chunk
from weight_transfer.format.delta_codec import Encoding, Level
from weight_transfer.format.entropy import decode_compact, encode_compact
from weight_transfer.format.tensors import WeightClass
from weight_transfer.kernels import cpu, range_coder

KINDS = {1: WeightClass(3, 4), 2: WeightClass(7, 8), 4: WeightClass(23, 8), 8: WeightClass(52, 8)}


@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([1, 2, 63, 65_535, 65_536, 65_537, 70_001]),
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
    indices, values = decode_compact(memoryview(payload), found.count, old)
    np.testing.assert_array_equal(indices, np.flatnonzero(old != new))
    np.testing.assert_array_equal(values, new[indices])


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


def test_an_empty_class_and_a_full_one(  # what a Rice code alone would pay for
) -> None:
    old = np.concatenate([np.full(40_000, 0x3C00, "<u2"), np.full(40_000, 0x4000, "<u2")])
    new = old.copy()
    new[:9_000] += 1
    found = cpu.compare(old, new, old.size, 0)
    assert found is not None
    payload = encode_compact(found, KINDS[2])
    assert len(payload) < 9_000 / 8 * 1.5, "a bit for each sign and next to nothing for places"
    indices, values = decode_compact(memoryview(payload), found.count, old)
    np.testing.assert_array_equal(values, new[:9_000])
    np.testing.assert_array_equal(indices, np.arange(9_000))


STEP = adam_step(32, 64, rate_for(0.1), seed=2)


@given(st.data())
def test_damaged_payloads_are_refused_or_decoded_inside_the_rows(data: st.DataObject) -> None:
    old, new = STEP.old, STEP.new
    chunk = encode_chunk(old, new, (0, 32), 0, Level.COMPACT)
    assert chunk.header.encoding is Encoding.COMPACT
    encoded = bytearray(chunk.encoded)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(64, len(encoded) - 1))
        encoded[at] ^= data.draw(st.integers(1, 255))
    try:
        change = decode_chunk(bytes(encoded), old, 0)
    except ChunkFormatError:
        return
    assert change.indices.size == chunk.header.changed
    assert change.indices.max() < old.bits.size
    assert (np.diff(change.indices) > 0).all()


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
