import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_transfer.errors import ManifestError, SignatureError
from weight_transfer.manifest import CODEC, ChunkRef, Manifest, OnUpdate, TensorUpdate
from weight_transfer.signing import SigningKey

KEY = SigningKey.from_hex("01" * 32)
CHUNKS = (
    ChunkRef("ab" * 32, (0, 5), "sparse", 100, 7),
    ChunkRef("cd" * 32, (5, 8), "empty", 64, 0),
)
TENSORS = (
    TensorUpdate("w", "bfloat16", (8, 4), "0" * 16, "1" * 16, CHUNKS),
    TensorUpdate("frozen", "float32", (), "2" * 16, "2" * 16, ()),
)
MANIFEST = Manifest("job", 2, 1, CODEC, "trainer", 10.0, 20.5, TENSORS).signed(KEY)


def test_json_round_trip_keeps_everything() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert MANIFEST.wire_bytes == 164
    assert MANIFEST.changed == 7


@pytest.mark.parametrize("how", OnUpdate)
def test_what_becomes_of_turns_in_flight_is_signed_too(how: OnUpdate) -> None:
    manifest = replace(MANIFEST, on_update=how).signed(KEY)
    read = Manifest.from_json(manifest.to_json())
    read.verify(KEY.verify_key)
    assert read.on_update is how
    if how is not OnUpdate.RECOMPUTE:
        with pytest.raises(SignatureError):
            replace(read, on_update=OnUpdate.RECOMPUTE).verify(KEY.verify_key)
        with pytest.raises(ManifestError):
            Manifest.from_json(manifest.to_json().replace(how.value.encode(), b"whenever"))


def test_a_chunk_used_twice_crosses_the_wire_once() -> None:
    twice = replace(TENSORS[0], name="v")
    assert replace(MANIFEST, tensors=(*TENSORS, twice)).wire_bytes == 164


@pytest.mark.parametrize(
    "altered",
    [
        replace(MANIFEST, version=3),
        replace(MANIFEST, parent=0),
        replace(MANIFEST, expires_s=1e9),
        replace(MANIFEST, tensors=TENSORS[:1]),
        replace(MANIFEST, signature=""),
        replace(MANIFEST, signature="zz"),
        replace(MANIFEST, signature="00" * 64),
    ],
)
def test_any_alteration_breaks_the_signature(altered: Manifest) -> None:
    MANIFEST.verify(KEY.verify_key)
    with pytest.raises(SignatureError):
        altered.verify(KEY.verify_key)
    with pytest.raises(SignatureError):
        MANIFEST.verify(SigningKey.generate().verify_key)


def test_a_key_survives_its_file_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    KEY.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SigningKey.load(path).verify_key == KEY.verify_key
    with pytest.raises(FileExistsError):
        KEY.save(path)


@given(st.binary(max_size=200))
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_json(raw)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["version"], -1),
        (["version"], True),
        (["version"], 1.5),
        (["created_s"], "now"),
        (["tensors"], {}),
        (["tensors", 0, "chunks", 0, "id"], "../../etc/passwd"),
        (["tensors", 0, "chunks", 0, "id"], "AB" * 32),
        (["tensors", 0, "chunks", 0, "rows"], [0]),
        (["tensors", 0, "chunks", 0, "rows"], [0, 4]),
        (["tensors", 0, "chunks", 1, "rows"], [5, 9]),
        (["tensors", 0, "chunks"], []),
        (["tensors", 1, "name"], "w"),
        (["tensors", 1, "digest_after"], "12"),
        (["signature"], None),
    ],
)
def test_fields_of_the_wrong_kind_are_refused(path: list[Any], value: object) -> None:
    plain = json.loads(MANIFEST.to_json())
    spot = plain
    for step in path[:-1]:
        spot = spot[step]
    spot[path[-1]] = value
    with pytest.raises(ManifestError):
        Manifest.from_json(json.dumps(plain).encode())
