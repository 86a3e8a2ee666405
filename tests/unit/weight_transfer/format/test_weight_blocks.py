"""Column blocks: coded, counted into the digest, tiled, applied, from hostile hands refused."""

import json
import time
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.weight_transfer.weight_cases import stepped, steps, tensor
from weight_transfer.apply.receiver import Receiver
from weight_transfer.errors import ChunkFormatError, ManifestError, TensorFormatError
from weight_transfer.format.chunk import HEADER, chunk_id, decode_chunk, encode_block, parse_header
from weight_transfer.format.delta_codec import Level
from weight_transfer.format.digest import MODULUS, Block, block_part, digest_of, tiling_fault
from weight_transfer.format.manifest import CODEC, Manifest, TensorUpdate, check_tiling, hex_digest
from weight_transfer.format.signing import HEAD_BYTES, SigningKey
from weight_transfer.format.tensors import TensorBits

KEY = SigningKey.from_hex("06" * 32)
Rectangle = tuple[tuple[int, int], tuple[int, int]]


def split(rows: int, columns: int, cuts: list[tuple[bool, int]]) -> list[Rectangle]:
    """A random tiling: each cut halves one rectangle of those there are, down or across."""
    found = [((0, rows), (0, columns))]
    for down, which in cuts:
        (a, b), (c, d) = found.pop(which % len(found))
        if down and b - a > 1:
            at = a + 1 + which % (b - a - 1)
            found += [((a, at), (c, d)), ((at, b), (c, d))]
        elif not down and d - c > 1:
            at = c + 1 + which % (d - c - 1)
            found += [((a, b), (c, at)), ((a, b), (at, d))]
        else:
            found.append(((a, b), (c, d)))
    return sorted(found, key=lambda r: (r[0][0], r[1][0]))


cuts = st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=12)


def encoded_step(
    old: TensorBits, new: TensorBits, tiles: list[Rectangle], level: Level
) -> tuple[TensorUpdate, dict[str, bytes]]:
    before = after = digest_of(old.bits)
    refs, chunks = [], {}
    for rows, columns in tiles:
        block = Block(rows, columns, old.row_elements)
        made = encode_block(
            block.cut(old.bits), block.cut(new.bits), block, old.weight_class, before, level
        )
        after = (after + made.digest_change) % MODULUS
        refs.append(made.header.ref(chunk_id(made.encoded)))
        chunks[refs[-1].id] = made.encoded
    digests = hex_digest(before), hex_digest(after)
    return TensorUpdate(old.name, old.dtype, old.shape, *digests, tuple(refs)), chunks


def manifest_of(update: TensorUpdate) -> Manifest:
    return Manifest("job", 1, 0, CODEC, "trainer", 0.0, 9.0, (update,)).signed(KEY)


@given(steps(), cuts, st.sampled_from(Level))
def test_any_tiling_carries_every_bit_and_adds_up_to_the_digest(
    step: tuple[TensorBits, TensorBits], where: list[tuple[bool, int]], level: Level
) -> None:
    old, new = step
    tiles = split(old.rows, old.row_elements, where)
    blocks = [Block(rows, columns, old.row_elements) for rows, columns in tiles]
    parts = sum(block_part(block.cut(old.bits), block) for block in blocks)
    assert parts % MODULUS == digest_of(old.bits)
    update, chunks = encoded_step(old, new, tiles, level)
    manifest = manifest_of(update)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    receiver = Receiver({old.name: old})
    staged = receiver.decode(manifest, chunks, KEY.verify_key, 0.0)
    for staged_tensor in staged.tensors:
        assert (np.diff(staged_tensor.change.indices) > 0).all(), "ascending, each once"
    receiver.commit(staged)
    np.testing.assert_array_equal(receiver.tensors[old.name].bits, new.bits)
    assert update.digest_after == hex_digest(digest_of(new.bits))


def test_a_block_is_cut_between_rows() -> None:
    block = Block((3, 10), (2, 6), 8)
    assert [b.rows for b in block.parts(9)] == [(3, 5), (5, 7), (7, 9), (9, 10)]
    assert [b.rows for b in block.parts(1)] == [(row, row + 1) for row in range(3, 10)]
    assert block.flat(np.array([0, 3, 4])).tolist() == [26, 29, 34]
    for rows, columns in [((3, 3), (0, 8)), ((0, 1), (4, 4)), ((0, 1), (0, 9)), ((-1, 1), (0, 8))]:
        with pytest.raises(TensorFormatError):
            Block(rows, columns, 8)


@given(st.integers(1, 12), st.integers(1, 12), cuts, st.data())
def test_only_exact_tilings_pass(
    rows: int, columns: int, where: list[tuple[bool, int]], data: st.DataObject
) -> None:
    tiles = split(rows, columns, where)
    assert tiling_fault(rows, columns, tiles) == ""
    at = data.draw(st.integers(0, len(tiles) - 1))
    wrong = list(tiles)
    harm = data.draw(st.sampled_from(["drop", "twice", "grow", "move", "shrink"]))
    (a, b), (c, d) = tiles[at]
    if harm == "drop":
        del wrong[at]
    elif harm == "twice":
        wrong.insert(at, tiles[at])
    else:
        moved = {"grow": (a, b + 1), "move": (a + 1, b + 1), "shrink": (a, b - 1)}[harm]
        wrong[at] = moved, (c, d)
    painted = np.zeros((rows + 2, columns), int)
    for (top, bottom), (left, right) in wrong:
        painted[top:bottom, left:right] += 1
    assert not ((painted[:rows] == 1).all() and not painted[rows:].any())
    assert tiling_fault(rows, columns, wrong) != ""
    assert tiling_fault(rows, columns, sorted(wrong, key=lambda r: (r[0][0], r[1][0]))) != ""


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 4))] * 2), max_size=5))
def test_what_passes_covers_each_weight_once(tiles: list[Rectangle]) -> None:
    if tiling_fault(3, 3, tiles):
        return
    painted = np.zeros((5, 5), int)
    for (a, b), (c, d) in tiles:
        painted[a:b, c:d] += 1
    assert (painted[:3, :3] == 1).all()
    assert painted.sum() == 9


def test_many_blocks_are_checked_in_time_even_in_the_worst_order() -> None:
    strips = [((0, 7), (at, at + 1)) for at in range(100_000)]
    cells = [((row, row + 1), (at, at + 1)) for row in range(300) for at in range(300)]
    began_s = time.thread_time()
    assert tiling_fault(7, 100_000, strips) == ""
    assert tiling_fault(300, 300, cells) == ""
    assert tiling_fault(1 << 62, 1 << 62, [((0, 1), (0, 1 << 61))] * 100_000) != ""
    Random(1).shuffle(cells)
    assert tiling_fault(300, 300, cells) != ""
    assert time.thread_time() - began_s < 5


def test_a_tensor_without_weights_is_tiled_by_its_rows() -> None:
    assert tiling_fault(5, 0, [((0, 2), (0, 0)), ((2, 5), (0, 0))]) == ""
    assert tiling_fault(5, 0, [((0, 5), (0, 3))]) != ""
    assert tiling_fault(5, 3, [((0, 5), (0, 0))]) != ""


OLD = tensor("w", (8, 10), seed=1)
NEW = stepped(OLD, 2, 0.5)
HALVES: list[Rectangle] = [((0, 8), (0, 5)), ((0, 8), (5, 10))]


def test_an_overlap_and_a_gap_in_a_manifest_are_refused() -> None:
    update, _ = encoded_step(OLD, NEW, HALVES, Level.FAST)
    left, right = update.chunks
    overlapping = structs.replace(right, columns=(4, 10))
    for chunks in [(left,), (left, left), (right, left), (left, overlapping)]:
        with pytest.raises(ManifestError, match=r"w \(8, 10\): chunks do not tile it"):
            check_tiling(structs.replace(update, chunks=chunks))
        raw = manifest_of(structs.replace(update, chunks=chunks)).to_bytes()
        with pytest.raises(ManifestError):
            Manifest.from_bytes(raw)


def test_a_manifest_that_swaps_two_blocks_is_refused() -> None:
    update, chunks = encoded_step(OLD, NEW, HALVES, Level.FAST)
    left, right = update.chunks
    swapped = (structs.replace(left, id=right.id), structs.replace(right, id=left.id))
    manifest = manifest_of(structs.replace(update, chunks=swapped))
    receiver = Receiver({"w": OLD})
    with pytest.raises(ChunkFormatError, match="its manifest says otherwise"):
        receiver.decode(manifest, chunks, KEY.verify_key, 0.0)
    np.testing.assert_array_equal(receiver.tensors["w"].bits, OLD.bits)


@pytest.mark.parametrize(
    ("column", "columns"), [(0, 10), (0, 11), (10, 1), (9, 2), (5, 0), ((1 << 32) - 1, 5)]
)
def test_columns_that_are_none_of_the_tensor_are_refused(column: int, columns: int) -> None:
    update, chunks = encoded_step(OLD, NEW, HALVES, Level.FAST)
    encoded = bytearray(chunks[update.chunks[0].id])
    at = HEADER.size - 8
    encoded[at:] = (columns << 32 | column).to_bytes(8, "little") + encoded[HEADER.size :]
    with pytest.raises(ChunkFormatError, match="columns"):
        decode_chunk(bytes(encoded), OLD, digest_of(OLD.bits))


def test_columns_beyond_a_header_are_refused() -> None:
    block = Block((0, 1), (1 << 32, (1 << 32) + 1), 1 << 33)
    with pytest.raises(ChunkFormatError, match="shard by rows"):
        encode_block(OLD.bits[:1], NEW.bits[:1], block, OLD.weight_class, 0)


def test_whole_rows_say_nothing_of_columns() -> None:
    update, chunks = encoded_step(OLD, NEW, [((0, 8), (0, 10))], Level.FAST)
    encoded = chunks[update.chunks[0].id]
    assert encoded[HEADER.size - 8 : HEADER.size] == bytes(8)
    assert parse_header(encoded).columns is None
    _, line = manifest_of(update).to_bytes()[HEAD_BYTES:].splitlines()
    assert json.loads(line)[-1][0][-2:] == [None, None]


def test_origins_travel_and_are_checked() -> None:
    update, chunks = encoded_step(OLD, NEW, HALVES, Level.FAST)
    refs = structs.replace(update.chunks[0], origin=1), update.chunks[1]
    manifest = manifest_of(structs.replace(update, chunks=refs))
    told = replace(manifest, origins=("http://a:1", "http://b:1")).signed(KEY)
    assert Manifest.from_bytes(told.to_bytes()) == told
    Receiver({"w": OLD}).decode(told, chunks, KEY.verify_key, 0.0)
    with pytest.raises(ManifestError, match="origin that is not listed"):
        Manifest.from_bytes(manifest.to_bytes())
    with pytest.raises(ManifestError):
        Manifest.from_bytes(
            manifest_of(structs.replace(update, shape=(8, *[1] * 99, 10))).to_bytes()
        )
