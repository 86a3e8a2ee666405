from pathlib import Path

import pytest
from weight_cases import model, next_model

from weight_transfer.errors import ChunkDigestError, ChunkMissingError, StoreError
from weight_transfer.publisher import Publisher
from weight_transfer.signing import SigningKey
from weight_transfer.store import ChunkStore

KEY = SigningKey.from_hex("02" * 32)


def publisher(store: ChunkStore) -> Publisher:
    return Publisher(store, "job", "trainer", KEY, chunk_bytes=256, clock=lambda: 100.0)


def test_a_chunk_comes_back_verified(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    name = store.put(b"hello")
    assert store.put(b"hello") == name
    assert store.get(name) == b"hello"
    (store.chunks_dir / name).write_bytes(b"hallo")
    with pytest.raises(ChunkDigestError):
        store.get(name)
    with pytest.raises(ChunkMissingError):
        store.get("0" * 64)


def test_a_manifest_is_refused_until_every_chunk_is_durable(tmp_path: Path) -> None:
    old = model(1)
    manifest = publisher(ChunkStore(tmp_path / "a")).publish(1, 0, old, next_model(old, 5))
    other = ChunkStore(tmp_path / "b")
    with pytest.raises(StoreError, match="not stored"):
        other.put_manifest(manifest)
    assert other.versions() == ()
    for chunk in manifest.chunks:
        other.put(ChunkStore(tmp_path / "a").get(chunk.id))
    other.put_manifest(manifest)
    assert other.versions() == (1,)
    assert other.get_manifest(1) == manifest


def test_a_version_is_final(tmp_path: Path) -> None:
    old, store = model(1), ChunkStore(tmp_path)
    manifest = publisher(store).publish(1, 0, old, next_model(old, 5))
    store.put_manifest(manifest)
    with pytest.raises(StoreError, match="published already"):
        publisher(store).publish(1, 0, old, next_model(old, 6))
    assert store.get_manifest(1) == manifest
    with pytest.raises(StoreError):
        store.get_manifest(2)


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    store.put(b"x")
    assert [p.name for p in store.chunks_dir.iterdir() if p.name.startswith(".")] == []
