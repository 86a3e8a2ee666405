"""Checkpoints and deltas on disk: whole or refused in a line, whatever a file holds."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

from weight_transfer.errors import DeltaFormatError, TensorFormatError
from weight_transfer.files.apply import apply_deltas
from weight_transfer.files.delta_file import (
    FORMAT,
    MAGIC,
    Delta,
    DeltaFile,
    DeltaIndex,
    compressed,
    decompressed,
    tail_of,
)
from weight_transfer.files.delta_writer import diff
from weight_transfer.format import checkpoint
from weight_transfer.format.checkpoint import INDEX, Checkpoint, read_model_dir, read_safetensors
from weight_transfer.format.chunk import chunk_id, encode_block
from weight_transfer.format.digest import Block, Range, digest_of
from weight_transfer.format.manifest import TensorUpdate
from weight_transfer.format.tensors import (
    PACKED_BITS,
    SAFETENSORS,
    TensorBits,
    bits_of,
    tensor_bits,
    tensor_of,
)

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def headed(head: bytes) -> bytes:
    return len(head).to_bytes(8, "little") + head


def save(path: Path, *names: str, dtype: str = "U8", nbytes: int = 2, elements: int = 2) -> None:
    entries = {
        name: {
            "dtype": dtype,
            "shape": [elements],
            "data_offsets": [at * nbytes, (at + 1) * nbytes],
        }
        for at, name in enumerate(names)
    }
    head = json.dumps(entries).encode()
    path.write_bytes(headed(head) + bytes(range(nbytes)) * len(names))


def sharded(folder: Path, **index: str) -> Path:
    """Two shards of a tensor each, and an index that names them as given."""
    folder.mkdir(exist_ok=True)
    save(folder / ONE, "a")
    save(folder / TWO, "b")
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"a": ONE, "b": "gone.safetensors"}, "names gone.safetensors, which is not there"),
        ({"a": ONE, "b": ONE}, f"{ONE} lacks b"),
        ({"a": ONE, "b": TWO, "c": TWO}, f"{TWO} lacks c"),
        ({"a": TWO}, f"{TWO} lacks a"),
        ({"c": ONE, "b": TWO}, f"lacks a, which is in {ONE}"),
        ({}, "names files that are not in its folder"),
        ({"a": "../x.safetensors"}, "names files that are not in its folder"),
    ],
)
def test_an_index_that_the_shards_do_not_bear_out_is_refused(
    tmp_path: Path, index: dict[str, str], why: str
) -> None:
    with pytest.raises(TensorFormatError, match=why):
        Checkpoint.open(sharded(tmp_path, **index))


@pytest.mark.parametrize("raw", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_an_index_that_is_cut_is_refused(tmp_path: Path, raw: str) -> None:
    (sharded(tmp_path) / INDEX).write_text(raw)
    with pytest.raises(TensorFormatError, match=INDEX):
        Checkpoint.open(tmp_path)


def test_a_stale_shard_beside_the_index_is_left_out(tmp_path: Path) -> None:
    save(sharded(tmp_path, a=ONE, b=TWO) / "model.safetensors", "a", "old")
    found = Checkpoint.open(tmp_path)
    assert (found.names, found.others) == (("a", "b"), (INDEX,))


def test_a_lost_shard_is_noticed_without_an_index(tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).unlink()
    assert Checkpoint.open(tmp_path).names == ("a", "b")
    (tmp_path / TWO).unlink()
    with pytest.raises(TensorFormatError, match="has 1 of 2 files"):
        Checkpoint.open(tmp_path)


def test_what_is_no_part_of_a_checkpoint_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_OTHER_BYTES", 8)
    save(tmp_path / "model.safetensors", "a")
    (tmp_path / "sub").mkdir()
    for name in ("config.json", "sub/tokenizer.json"):
        (tmp_path / name).write_text("{}")
    for name in ("optimizer.pt", "pytorch_model.bin", "sub/x.safetensors", ".hidden"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "log.txt").write_bytes(bytes(9))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone.json").symlink_to("nowhere")
    assert Checkpoint.open(tmp_path).others == ("config.json", "sub/tokenizer.json")
    (tmp_path / "pipe").rename(tmp_path / "model.safetensors")
    with pytest.raises(TensorFormatError, match="no regular file"):
        Checkpoint.open(tmp_path)


def test_a_file_name_that_is_not_utf8_is_refused_in_a_line_that_can_be_printed(
    tmp_path: Path,
) -> None:
    save(tmp_path / "model.safetensors", "a")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.json")).write_text("{}")
    with pytest.raises(TensorFormatError, match="is not UTF-8; rename it") as told:
        Checkpoint.open(tmp_path)
    assert str(told.value).isascii()


@pytest.mark.parametrize("dtype", SAFETENSORS)
def test_every_dtype_of_safetensors_is_carried_as_bits(tmp_path: Path, dtype: str) -> None:
    old, new, out = (tmp_path / name for name in ("old", "new", "out"))
    bits = PACKED_BITS.get(dtype, 8 * SAFETENSORS[dtype][1])
    for path in (old, new):
        save(path, "a", dtype=dtype, nbytes=3 * bits, elements=24)
    new.write_bytes(new.read_bytes()[:-1] + b"\xff")
    delta = diff(Checkpoint.open(old), Checkpoint.open(new), tmp_path / "delta")
    apply_deltas(Checkpoint.open(old), [delta], out)
    assert out.read_bytes() == new.read_bytes()
    held = Checkpoint.open(out).tensor("a")
    assert tensor_bits("a", tensor_of(held)).bits.tobytes() == held.bits.tobytes()


@pytest.mark.parametrize(
    ("dtype", "elements", "nbytes", "words"),
    [
        ("Q9", 2, 2, "a is of dtype Q9, which is not carried"),
        ("F4", 3, 2, "cannot read the entry of a"),
        ("F4", 2, 2, "offsets"),
        ("F6_E2M3", 2, 2, "cannot read the entry of a"),
    ],
)
def test_a_dtype_that_is_not_carried_or_ends_within_a_byte_is_refused_by_its_name(
    tmp_path: Path, dtype: str, elements: int, nbytes: int, words: str
) -> None:
    save(tmp_path / "x", "a", dtype=dtype, elements=elements, nbytes=nbytes)
    with pytest.raises(TensorFormatError, match=words):
        Checkpoint.open(tmp_path / "x")


def test_a_delta_and_what_it_makes_survive_a_power_cut(
    tmp_path: Path, synced: list[tuple[int, str]]
) -> None:
    for name in ("old", "new"):
        sharded(tmp_path / name, a=ONE, b=TWO)
    old, new = (Checkpoint.open(tmp_path / name) for name in ("old", "new"))
    apply_deltas(old, [diff(old, new, tmp_path / "delta")], tmp_path / "out")
    made = [tmp_path / "delta", *(tmp_path / "out").iterdir()]
    inodes = {inode for inode, _ in synced}
    assert [path for path in made if path.stat().st_ino not in inodes] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_bits_survive_torch_both_ways(dtype: torch.dtype) -> None:
    weights = torch.tensor([[0.0, -0.0, float("nan")], [float("inf"), 1e-40, -1.5]]).to(dtype)
    bits = tensor_bits("w", weights)
    back = tensor_of(bits)
    assert (back.dtype, back.shape) == (weights.dtype, weights.shape)
    np.testing.assert_array_equal(bits_of(back), bits.bits)
    assert bits.bits[0] != bits.bits[1], "-0 is a weight of its own"


def test_a_file_reads_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(7, 3).bfloat16(),
        "b": torch.randn(5),
        "c": torch.tensor(2.5, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = read_model_dir(tmp_path)
    assert read.keys() == tensors.keys()
    for name, weights in tensors.items():
        assert (read[name].dtype, read[name].shape) == (
            str(weights.dtype).removeprefix("torch."),
            tuple(weights.shape),
        )
        np.testing.assert_array_equal(read[name].bits, bits_of(weights))
    assert (read["a"].rows, read["a"].row_elements) == (7, 3)
    assert (read["c"].rows, read["c"].row_elements) == (1, 1)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 8,
        headed(b"[]"),
        headed(b"{{{{"),
        headed(b'{"w":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}'),
        headed(b'{"w":{"dtype":"I9","shape":[0],"data_offsets":[0,0]}}'),
        headed(b'{"w":7}'),
    ],
)
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(TensorFormatError):
        read_safetensors(path)


def test_a_head_that_drafts_is_read_with_the_policy(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert read_model_dir(tmp_path).keys() == {"a"}
    save_file({"a": torch.zeros(2)}, tmp_path / "draft/model.safetensors")
    read = read_model_dir(tmp_path)
    assert {name: (t.name, t.bits.size) for name, t in read.items()} == {
        "a": ("a", 3),
        "draft.a": ("draft.a", 2),
    }
    assert not read["draft.a"].bits.any()


def test_a_directory_without_weights_or_with_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorFormatError, match=r"no \*"):
        read_model_dir(tmp_path)
    for name in ("a", "b"):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(TensorFormatError, match="two files"):
        read_model_dir(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "rows", "bits_dtype"),
    [("bfloat16", 3, "<u2"), ("bfloat16", 4, "<u4"), ("int4", 4, "u1")],
)
def test_bits_that_do_not_fit_are_refused(dtype: str, rows: int, bits_dtype: str) -> None:
    with pytest.raises(TensorFormatError):
        TensorBits("w", dtype, (rows,), np.zeros(4, dtype=bits_dtype))
    with pytest.raises(TensorFormatError):
        bits_of(torch.zeros(3, dtype=torch.complex128))


DELTA_INDEX = DeltaIndex(
    FORMAT,
    "fast",
    single=True,
    files=(DeltaFile("model.safetensors", 100, head="ab" * 32),),
    tensors=(TensorUpdate("w", "float32", (8, 4), "2" * 16, "2" * 16, ()),),
    fresh=("w",),
    blobs={"ab" * 32: (len(MAGIC), 10)},
)


def test_an_index_comes_back() -> None:
    assert DeltaIndex.from_bytes(DELTA_INDEX.to_bytes(), 100) == DELTA_INDEX


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blobs", {"ab" * 32: [8, float("inf")]}),
        ("blobs", {"ab" * 32: [8, -1]}),
        ("blobs", {"ab" * 32: [8, 1 << 62]}),
        ("blobs", {"../x": [8, 1]}),
        ("files", [{"path": "../x", "size": 1, "blob": "ab" * 32}]),
        ("files", [{"path": "x", "size": float("inf"), "blob": "ab" * 32}]),
        ("files", [{"path": "x", "size": 1}]),
        ("tensors", [["w", "float32", [float("inf")], "2" * 16, "2" * 16, []]]),
        ("single", "yes"),
        ("format", 1),
        ("format", float("nan")),
        ("level", []),
        ("more", 1),
    ],
)
def test_what_is_no_index_is_refused(name: str, value: object) -> None:
    plain: dict[str, Any] = json.loads(decompressed(DELTA_INDEX.to_bytes(), 1 << 20))
    raw = json.dumps(plain | {name: value}).encode()
    with pytest.raises(DeltaFormatError):
        DeltaIndex.from_bytes(compressed(raw), 100)


@pytest.mark.parametrize("raw", [b"", b"[" * 100_000, b'{"format":1e400}', b"\xff"])
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(DeltaFormatError):
        DeltaIndex.from_bytes(compressed(raw), 100)
    with pytest.raises(DeltaFormatError):
        DeltaIndex.from_bytes(raw, 100)


@dataclass
class DeltaCase:
    """A delta between two files in `folder`: `old.safetensors` and `new.safetensors`."""

    folder: Path
    old: torch.Tensor
    new: torch.Tensor
    delta: Delta

    def in_blocks(self, cut: int) -> Delta:
        """Return the same delta with the chunks of `w` as two blocks of columns, cut at `cut`."""
        before, after = tensor_bits("w", self.old), tensor_bits("w", self.new)
        columns: list[Range] = [(0, cut), (cut, 24)]
        made = []
        for stretch in columns:
            block = Block((0, 40), stretch, 24)
            cuts = block.cut(before.bits), block.cut(after.bits)
            made.append(encode_block(*cuts, block, before.weight_class, digest_of(before.bits)))
        refs = tuple(chunk.header.ref(chunk_id(chunk.encoded)) for chunk in made)
        blobs = {ref.id: chunk.encoded for ref, chunk in zip(refs, made, strict=True)}
        blobs |= {name: self.delta.blob(name) for name in self.delta.index.blobs}
        raw, places = MAGIC, {}
        for name, blob in blobs.items():
            places[name] = len(raw), len(blob)
            raw += blob
        tensors = tuple(
            structs.replace(t, chunks=refs) if t.name == "w" else t
            for t in self.delta.index.tensors
        )
        return self.written(raw, structs.replace(self.delta.index, tensors=tensors, blobs=places))

    def written(self, blobs: bytes, index: DeltaIndex) -> Delta:
        raw = index.to_bytes()
        (self.folder / "other.delta").write_bytes(blobs + raw + tail_of(len(blobs), raw))
        return Delta.open(self.folder / "other.delta")


@pytest.fixture
def case(tmp_path: Path) -> DeltaCase:
    draw = torch.Generator().manual_seed(1)
    old = torch.randn(40, 24, generator=draw).bfloat16()
    new = torch.where(torch.rand(40, 24, generator=draw) < 0.3, old * 1.01, old)
    paths = [tmp_path / f"{name}.safetensors" for name in ("old", "new")]
    for path, weights in zip(paths, (old, new), strict=True):
        save_file({"w": weights, "x": torch.ones(3)}, path)
    delta = diff(*map(Checkpoint.open, paths), tmp_path / "plain.delta")
    return DeltaCase(tmp_path, old, new, delta)


def test_column_blocks_in_a_delta_apply(case: DeltaCase) -> None:
    blocks, root = case.in_blocks(7), case.folder
    assert [t.chunks[0].columns for t in blocks.index.tensors if t.chunks] == [(0, 7)]
    before = Checkpoint.open(root / "old.safetensors")
    apply_deltas(before, [blocks], root / "out.safetensors", threads=2)
    assert (root / "out.safetensors").read_bytes() == (root / "new.safetensors").read_bytes()


def test_blocks_that_overlap_in_a_delta_are_refused(case: DeltaCase) -> None:
    good = case.in_blocks(7).index
    tensors = tuple(
        structs.replace(t, chunks=(t.chunks[0], t.chunks[0])) if t.chunks else t
        for t in good.tensors
    )
    with pytest.raises(DeltaFormatError, match="do not tile"):
        case.written(MAGIC, structs.replace(good, tensors=tensors, blobs={}))
