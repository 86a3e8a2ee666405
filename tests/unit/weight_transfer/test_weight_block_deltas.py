"""A delta file whose chunks are column blocks applies like any other; overlaps are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from weight_transfer.errors import DeltaFormatError
from weight_transfer.files.apply import apply_deltas
from weight_transfer.files.delta_file import MAGIC, Delta, tail_of
from weight_transfer.files.delta_writer import diff
from weight_transfer.format.checkpoint import Checkpoint
from weight_transfer.format.chunk import chunk_id, encode_block
from weight_transfer.format.digest import Block, Range, digest_of
from weight_transfer.format.tensors import tensor_bits


def rewritten(delta: Delta, out: Path, old: torch.Tensor, new: torch.Tensor, cut: int) -> Path:
    """The same delta with the chunks of `w` replaced by two blocks of columns, cut at `cut`."""
    before, after = tensor_bits("w", old), tensor_bits("w", new)
    columns: list[Range] = [(0, cut), (cut, 24)]
    made = []
    for stretch in columns:
        block = Block((0, 40), stretch, 24)
        cuts = block.cut(before.bits), block.cut(after.bits)
        made.append(encode_block(*cuts, block, before.weight_class, digest_of(before.bits)))
    refs = tuple(chunk.header.ref(chunk_id(chunk.encoded)) for chunk in made)
    blobs = {ref.id: chunk.encoded for ref, chunk in zip(refs, made, strict=True)}
    blobs |= {name: delta.blob(name) for name in delta.index.blobs}
    raw, places = MAGIC, {}
    for name, blob in blobs.items():
        places[name] = len(raw), len(blob)
        raw += blob
    tensors = tuple(
        structs.replace(t, chunks=refs) if t.name == "w" else t for t in delta.index.tensors
    )
    index = structs.replace(delta.index, tensors=tensors, blobs=places).to_bytes()
    out.write_bytes(raw + index + tail_of(len(raw), index))
    return out


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Delta, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    old = torch.randn(40, 24, generator=draw).bfloat16()
    new = torch.where(torch.rand(40, 24, generator=draw) < 0.3, old * 1.01, old)
    for name, weights in (("old", old), ("new", new)):
        path = tmp_path / f"{name}.safetensors"
        save_file({"w": weights, "x": torch.ones(3)}, path)
    before, after = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    delta = diff(Checkpoint.open(before), Checkpoint.open(after), tmp_path / "plain.delta")
    return tmp_path, before, delta, old, new


def test_column_blocks_in_a_delta_apply(
    files: tuple[Path, Path, Delta, torch.Tensor, torch.Tensor],
) -> None:
    root, before, delta, old, new = files
    blocks = Delta.open(rewritten(delta, root / "blocks.delta", old, new, 7))
    assert [t.chunks[0].columns for t in blocks.index.tensors if t.chunks] == [(0, 7)]
    apply_deltas(Checkpoint.open(before), [blocks], root / "out.safetensors", threads=2)
    assert (root / "out.safetensors").read_bytes() == (root / "new.safetensors").read_bytes()
    found = load_file(root / "out.safetensors")["w"]
    np.testing.assert_array_equal(tensor_bits("w", found).bits, tensor_bits("w", new).bits)


def test_blocks_that_overlap_in_a_delta_are_refused(
    files: tuple[Path, Path, Delta, torch.Tensor, torch.Tensor],
) -> None:
    root, _, delta, old, new = files
    good = Delta.open(rewritten(delta, root / "blocks.delta", old, new, 7)).index
    tensors = tuple(
        structs.replace(t, chunks=(t.chunks[0], t.chunks[0])) if t.chunks else t
        for t in good.tensors
    )
    index = structs.replace(good, tensors=tensors, blobs={}).to_bytes()
    bad = root / "bad.delta"
    bad.write_bytes(MAGIC + index + tail_of(len(MAGIC), index))
    with pytest.raises(DeltaFormatError, match="do not tile"):
        Delta.open(bad)
