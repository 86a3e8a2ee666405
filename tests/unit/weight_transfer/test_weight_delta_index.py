"""The index of a delta file comes from anywhere: what is no index is one error that says so."""

import json
from typing import Any

import pytest

from weight_transfer.errors import DeltaFormatError
from weight_transfer.files.delta_file import (
    FORMAT,
    MAGIC,
    DeltaFile,
    DeltaIndex,
    compressed,
    decompressed,
)
from weight_transfer.format.manifest import TensorUpdate

INDEX = DeltaIndex(
    FORMAT,
    "fast",
    single=True,
    files=(DeltaFile("model.safetensors", 100, head="ab" * 32),),
    tensors=(TensorUpdate("w", "float32", (8, 4), "2" * 16, "2" * 16, ()),),
    fresh=("w",),
    blobs={"ab" * 32: (len(MAGIC), 10)},
)


def test_an_index_comes_back() -> None:
    assert DeltaIndex.from_bytes(INDEX.to_bytes(), 100) == INDEX


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
    plain: dict[str, Any] = json.loads(decompressed(INDEX.to_bytes(), 1 << 20))
    raw = json.dumps(plain | {name: value}).encode()
    with pytest.raises(DeltaFormatError):
        DeltaIndex.from_bytes(compressed(raw), 100)


@pytest.mark.parametrize("raw", [b"", b"[" * 100_000, b'{"format":1e400}', b"\xff"])
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(DeltaFormatError):
        DeltaIndex.from_bytes(compressed(raw), 100)
    with pytest.raises(DeltaFormatError):
        DeltaIndex.from_bytes(raw, 100)
