"""Cases in which a device's kernels must give the CPU's bits, run by `test_weight_device`.

Run on a GPU where there is one, otherwise (TRITON_INTERPRET=1) in Triton's interpreter.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.unit.weight_transfer import loader_cases
from tests.unit.weight_transfer.weight_cases import KINDS, model, next_model, tensor
from weight_transfer.apply import loader_map
from weight_transfer.apply import staging as applier
from weight_transfer.apply.trace_loader import flat_view
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import TensorFormatError
from weight_transfer.format.chunk import encode_block, encode_chunk
from weight_transfer.format.delta_codec import Encoding, Level
from weight_transfer.format.digest import Block, digest_of
from weight_transfer.format.manifest import Manifest
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import (
    Bits,
    DeviceBits,
    TensorBits,
    WeightClass,
    device_bits,
    device_tensor,
    tensor_of,
    to_device,
)
from weight_transfer.kernels import cpu, device
from weight_transfer.kernels.processor import Change
from weight_transfer.publish.version_publisher import VersionPublisher

PLACE = torch.zeros(0, device="cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")
WIDTHS = (1, 2, 4, 8)
WIDTH_OF = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "float64": 8}
# Around a tile of the first pass (4096 or less), of lists (1024), and none at all.
SIZES = (0, 1, 7, 8, 1023, 1025, 4095, 4096, 4097, 9001)
FEW = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


def held(bits: Bits) -> DeviceBits:
    return DeviceBits(to_device(bits, PLACE))


def held_tensor(host: TensorBits) -> Any:
    return device_tensor(host.name, tensor_of(host).to(PLACE.device), copy=False)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """Old and new bits: sparse ulps or anything, from nothing changed to everything."""
    width, size = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    old = rng.integers(0, 1 << (8 * width), size, dtype=f"<u{width}")
    new = old.copy()
    moved = rng.random(size) < draw(st.sampled_from([0, 0.001, 0.05, 0.6, 1]))
    most = draw(st.sampled_from([5, (1 << (8 * width)) - 1]))
    new[moved] += rng.integers(1, most, np.count_nonzero(moved), dtype=old.dtype)
    return old, new


@FEW
@given(ranges(), st.sampled_from([0, 5, 1 << 33]))
def test_a_difference_and_its_marks_are_the_cpus(step: tuple[Bits, Bits], first: int) -> None:
    old, new = step
    wanted = cpu.compare(old, new, old.size, first)
    found = device.compare(held(old), held(new), old.size, first)
    assert wanted is not None
    assert found is not None
    assert (found.count, found.growth) == (wanted.count, wanted.growth)
    marked, marks = cpu.mark(old, new, first), device.mark(held(old), held(new), first)
    assert marks.growth == marked.growth
    for got, expected in (
        (found.gaps, wanted.gaps),
        (found.codes, wanted.codes),
        (marks.bitmap, marked.bitmap),
        (marks.codes, marked.codes),
    ):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("beyond", [0, 1])
def test_more_changes_than_room_are_none(beyond: int) -> None:
    old = np.zeros(5000, "<u2")
    new = old.copy()
    new[::7] = 1
    changed, room = np.count_nonzero(new), np.count_nonzero(new) - beyond
    for processor, hold in ((cpu, np.asarray), (device, held)):
        found = processor.compare(hold(old), hold(new), room, 0)
        assert found is None if beyond else found is not None and found.count == changed


@FEW
@given(ranges(), st.sampled_from([0, 3, (1 << 40) + 1]))
def test_digests_are_the_cpus(step: tuple[Bits, Bits], first: int) -> None:
    bits, _ = step
    assert device.digest(held(bits), first) == cpu.digest(bits, first)


def test_a_digest_of_many_tiles_wraps_as_the_cpus_does() -> None:
    bits = np.full(40_000, 0xFFFFFFFFFFFFFFFF, "<u8")
    assert device.digest(held(bits), 0) == cpu.digest(bits, 0)


def classed(width: int, size: int) -> tuple[Bits, Bits]:
    """Weights of classes 2 to 12, of which those of 4 to 10 change: all of 4, then half as many."""
    rng = np.random.default_rng(width)
    shift = KINDS[width].shift
    kinds = 2 + rng.binomial(10, 0.5, size)
    moved = (rng.random(size) < 0.5 ** (kinds - 4.0)) & (kinds >= 4) & (kinds <= 10)
    moved[np.argmax(kinds == np.arange(4, 11)[:, None], axis=1)] = True
    old = (kinds.astype(f"<u{width}") << shift) + rng.integers(0, 1 << shift, size, f"<u{width}")
    new = np.where(moved, old + rng.choice(np.array([1, -1]).astype(old.dtype), size), old)
    return old.astype(f"<u{width}"), new.astype(f"<u{width}")


def same_ranks(old: Bits, new: Bits, kind: WeightClass, rare: int) -> int:
    """Compare with the CPU; `rare` classes of each side are one. Returns how many are left."""
    pair = cpu.compare(old, new, old.size, 0), device.compare(held(old), held(new), old.size, 0)
    wanted, found = (each.class_counts(kind) for each in pair if each)
    np.testing.assert_array_equal(found, wanted)
    changed = np.flatnonzero(wanted)
    present = changed[rare : changed.size - rare]
    ends = np.array([changed[0], present[0], present[-1], changed[-1]], np.uint8)
    counts = wanted[present]
    counts[0] += wanted[: present[0]].sum()
    counts[-1] += wanted[present[-1] + 1 :].sum()
    starts = np.cumsum(counts) - counts
    wanted_pair, found_pair = (
        each.by_class(kind, ends, present.astype(np.uint8), starts.copy()) for each in pair if each
    )
    for one, other in zip(found_pair, wanted_pair, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    return present.size


@pytest.mark.parametrize("width", WIDTHS)
def test_ranks_by_class_are_the_cpus_whatever_is_gathered(width: int) -> None:
    old, new = classed(width, 700)
    assert [same_ranks(old, new, KINDS[width], rare) for rare in (0, 1)] == [7, 5]
    assert same_ranks(old, new, WeightClass(0, 0), 0) == 1


def test_ranks_are_counted_in_the_tiles_that_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile is compared with itself: one eight times as wide is eight times the work."""
    launched: list[int] = []
    real = device.kernels.rank_changed

    class Recorded:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*args: Any, **shape: int) -> None:
                launched.append(shape["tile_size"])
                real[grid](*args, **shape)

            return launch

    monkeypatch.setattr(device.kernels, "rank_changed", Recorded())
    assert same_ranks(*classed(2, 700), KINDS[2], rare=0) == 7
    assert launched == [device.RANKED] == [128]


def test_ranks_are_counted_over_blocks_in_a_few_classes_and_in_all() -> None:
    old, new = classed(2, 4_200)
    assert same_ranks(old, new, KINDS[2], rare=2) == 3
    rng = np.random.default_rng(0)
    old = rng.permutation(np.arange(4_200, dtype="<u2") << 4)
    assert same_ranks(old, old + 1, WeightClass(4, 8), rare=0) == 256


@FEW
@given(ranges(), st.integers(0, 99), st.sampled_from([0, 1 << 40]))
def test_an_exchange_writes_and_says_what_the_cpus_does_and_goes_back(
    step: tuple[Bits, Bits], seed: int, resident_bytes: int
) -> None:
    old, new = step
    places = np.random.default_rng(seed).permutation(old.size)[: old.size // 2]
    host, live = old.copy(), held(old.copy())
    change = Change(places, old[places], new[places])
    one, other = cpu.stage([(host, change)], 0), device.stage([(live, change)], resident_bytes)
    np.testing.assert_array_equal(device.read(live), old, "nothing is written before its time")
    assert not one.run().any()
    assert not other.run().any()
    np.testing.assert_array_equal(device.read(live), host)
    stale = np.count_nonzero(old[places] != new[places])
    assert other.run().tolist() == [[stale, 0]], "the old values are not there any more"
    np.testing.assert_array_equal(device.read(live), host)
    assert not other.run(back=True).any()
    np.testing.assert_array_equal(device.read(live), old)


def test_changes_are_cut_into_pieces_and_counted_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "PIECE_BYTES", 4096)
    lives = [held(np.zeros(5000, "<u2")) for _ in range(3)]
    every, some = np.arange(5000), np.arange(0, 5000, 5)
    changes = [
        (live, Change(at, np.full(at.size, was, "<u2"), np.full(at.size, 9, "<u2")))
        for live, at, was in zip(lives, (every, some, every[:0]), (0, 1, 0), strict=True)
    ]
    exchange = device.stage(changes, 10_000)
    assert len(exchange.resident) == 2, "of 4096 bytes each"
    assert len(exchange.streamed) > 8
    assert exchange.run().tolist() == [[0, 0], [1000, 0], [0, 0]]
    assert device.read(lives[0]).tolist() == [9] * 5000
    assert [np.count_nonzero(device.read(live)) for live in lives] == [5000, 1000, 0]


def test_a_device_holds_no_more_of_an_update_than_it_is_granted() -> None:
    live = held(np.zeros(400_000, "<u2"))
    places = np.arange(400_000)
    change = live, Change(places, np.zeros(400_000, "<u2"), np.ones(400_000, "<u2"))
    granted = device.stage([change], 3_200_000)
    assert granted.device_bytes == 8 * 400_000 + 16, "a place of four bytes and two values"
    assert device.stage([change], 3_199_999).device_bytes == device.PIECE_BYTES + 16


@pytest.mark.parametrize("processor", [cpu, device])
def test_weights_that_do_not_keep_what_is_written_are_noticed(processor: Any) -> None:
    host = np.arange(10, dtype="<u2")
    live = host if processor is cpu else held(host)
    # One place twice: one of both values cannot be there afterwards.
    change = live, Change(np.array([3, 3]), np.array([3, 3], "<u2"), np.array([7, 8], "<u2"))
    assert processor.stage([change], 1 << 20).run()[0, 1] == 1


@pytest.mark.parametrize("place", [-1, 10])
def test_a_place_outside_is_refused_before_anything_is_written(place: int) -> None:
    bits, places = np.zeros(10, "<u2"), np.array([0, place])
    for processor, live in ((cpu, bits), (device, held(bits))):
        change = live, Change(places, np.zeros(2, "<u2"), np.ones(2, "<u2"))
        with pytest.raises(IndexError, match="outside its 10 weights"):
            processor.stage([change], 1 << 20)


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_sharded_tied_and_transposed_parameters_become_what_numpy_makes_them(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = loader_cases.checkpoint(0)
    new = loader_cases.sparse_step(base, seed=1)
    update = loader_cases.staged(base, new, tmp_path)
    host, live = (loader_cases.loaded(loader_cases.FakeEngineModel(rank), base) for _ in range(2))
    live = live.to(PLACE.device)
    assert applier.write(applier.place(loader_cases.proved(host, base), update)) == ()
    on_device = loader_cases.proved(live, base)
    # In the interpreter a device's memory is the host's.
    monkeypatch.setattr(loader_map, "live_bits", lambda t: DeviceBits(flat_view(t)))
    strided = [name for name in on_device.names for r in on_device.rectangles(name)
               if r.target_strides != (1,)]  # fmt: skip
    assert strided, "some parameters hold their weights in another order, or with gaps"
    placement = applier.place(on_device, update)
    before = loader_cases.everything(live)
    assert applier.write(placement) == ()
    assert loader_cases.everything(live) == loader_cases.everything(host) != before
    again = set(applier.write(placement))
    assert again == {name for name, _ in placement.changes}, "not the parent's any more"
    applier.write_back(placement)
    assert loader_cases.everything(live) == before


def test_parameters_with_gaps_between_their_rows_are_written_where_they_are() -> None:
    storage = torch.zeros(8, 16, dtype=torch.bfloat16, device=PLACE.device)
    view = storage[:, 2:7].T
    bits = DeviceBits(flat_view(view))
    # Position (column, row) of the view is 16·row + column of its memory.
    places = np.array([0, 1, 16 + 4, 7 * 16 + 4])
    change = bits, Change(places, np.zeros(4, "<u2"), np.full(4, 0x3F80, "<u2"))
    assert not device.stage([change], 1 << 20).run().any()
    assert storage.nonzero().tolist() == [[0, 2], [0, 3], [1, 6], [7, 6]]
    assert view.float().sum() == 4


def of_encoding(encoding: Encoding, dtype: str) -> tuple[TensorBits, TensorBits]:
    """A tensor [31, 67] and the step that is encoded this way."""
    width = WIDTH_OF[dtype]
    rng = np.random.default_rng(width)
    old, new = classed(width, 31 * 67)
    if encoding is Encoding.EMPTY:
        new = old
    elif encoding is Encoding.BITMAP:
        new = old + rng.integers(0, 2, old.size).astype(old.dtype)
    elif encoding is Encoding.DENSE:
        new = old + rng.integers(1, 1 << (8 * width), old.size, dtype=old.dtype)
    before, after = (TensorBits("w", dtype, (31, 67), bits) for bits in (old, new))
    return before, after


@pytest.mark.parametrize("dtype", WIDTH_OF)
@pytest.mark.parametrize("encoding", [each for each in Encoding if not each.field])
def test_chunks_are_the_cpus_byte_for_byte(dtype: str, encoding: Encoding) -> None:
    old, new = of_encoding(encoding, dtype)
    level = Level.COMPACT if encoding is Encoding.COMPACT else Level.FAST
    digest = digest_of(old.bits)
    one, other = held_tensor(old), held_tensor(new)
    assert digest_of(one.bits) == digest
    wanted = encode_chunk(old, new, (9, 31), digest, level)
    assert wanted.header.encoding is encoding
    assert encode_chunk(one, other, (9, 31), digest, level) == wanted


def test_a_publisher_takes_tensors_of_a_device(tmp_path: Path) -> None:
    old = model(seed=1)
    new = next_model(old, seed=2)
    key = SigningKey.generate()

    def published(name: str, *weights: dict[str, Any]) -> list[Manifest]:
        store = ChunkStore(tmp_path / name)
        trainer = VersionPublisher(store, "job", "trainer", key, clock=lambda: 1000.0)
        return [trainer.publish_base(0, weights[0]), trainer.publish(1, 0, *weights)]

    on_device = [{name: held_tensor(bits) for name, bits in each.items()} for each in (old, new)]
    assert published("device", *on_device) == published("host", old, new)


def test_a_snapshot_keeps_what_training_overwrites() -> None:
    live = torch.ones(5, dtype=torch.bfloat16, device=PLACE.device)
    kept, shared = device_tensor("w", live), device_tensor("w", live, copy=False)
    live.zero_()
    assert device.read(kept.bits).tolist() == [0x3F80] * 5
    assert device.read(shared.bits).tolist() == [0] * 5


def test_what_a_device_cannot_take_is_refused_in_one_line() -> None:
    old, bits = tensor("w", (4, 4), seed=1), held(np.zeros(8, "<u2"))
    with pytest.raises(TensorFormatError, match="put both on one"):
        encode_chunk(old, held_tensor(old), (0, 4), 0)
    with pytest.raises(TensorFormatError, match=r"columns \(0, 2\) are on .*; shard by rows"):
        encode_block(bits, bits, Block((0, 4), (0, 2), 3), KINDS[2], 0)
    with pytest.raises(TensorFormatError, match="complex128 is not carried"):
        device_bits(torch.zeros(1, dtype=torch.complex128))


def test_live_weights_that_are_not_contiguous_are_refused_but_may_be_published() -> None:
    square = torch.arange(6, dtype=torch.int16, device=PLACE.device).view(2, 3)
    with pytest.raises(TensorFormatError, match="not contiguous"):
        device_bits(square.T)
    assert device.read(device_tensor("w", square.T).bits).tolist() == [0, 3, 1, 4, 2, 5]
