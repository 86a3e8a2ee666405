"""A checkpoint folder is whole or refused in a line; what is no part of it costs nothing."""

import json
import os
from pathlib import Path

import pytest

from weight_transfer.errors import TensorFormatError
from weight_transfer.files.apply import apply_deltas
from weight_transfer.files.delta_writer import diff
from weight_transfer.format import checkpoint
from weight_transfer.format.checkpoint import INDEX, Checkpoint
from weight_transfer.format.tensors import tensor_bits, tensor_of

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


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
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(range(nbytes)) * len(names))


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


def test_a_shard_that_is_a_fifo_is_refused_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
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


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("F8_E8M0", 2), ("F8_E4M3FNUZ", 2), ("F8_E5M2FNUZ", 2), ("C64", 16)]
)
def test_every_dtype_of_whole_bytes_is_carried_as_bits(
    tmp_path: Path, dtype: str, nbytes: int
) -> None:
    old, new, out = (tmp_path / name for name in ("old", "new", "out"))
    save(old, "a", dtype=dtype, nbytes=nbytes)
    save(new, "a", dtype=dtype, nbytes=nbytes)
    new.write_bytes(new.read_bytes()[:-1] + b"\xff")
    delta = diff(Checkpoint.open(old), Checkpoint.open(new), tmp_path / "delta")
    apply_deltas(Checkpoint.open(old), [delta], out)
    assert out.read_bytes() == new.read_bytes()
    bits = Checkpoint.open(out).tensor("a")
    assert tensor_bits("a", tensor_of(bits)).bits.tobytes() == bits.bits.tobytes()


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "Q9"])
def test_a_dtype_that_is_not_carried_is_refused_by_its_name(tmp_path: Path, dtype: str) -> None:
    save(tmp_path / "x", "a", dtype=dtype)
    with pytest.raises(TensorFormatError, match=f"a is of dtype {dtype}, which is not carried"):
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
