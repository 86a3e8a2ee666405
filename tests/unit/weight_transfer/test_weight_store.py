"""A store keeps versions durable and sound; they come back out of it bit for bit, or not at all."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.unit.weight_transfer.weight_cases import chunks_of, model, next_model
from weight_transfer import TensorBits, newest_version, restore
from weight_transfer.chunk_store import ChunkStore, draft
from weight_transfer.errors import (
    CatalogError,
    ChunkDigestError,
    ChunkMissingError,
    ManifestError,
    SignatureError,
    StoreError,
    WrongBaseError,
)
from weight_transfer.format.chunk import chunk_id
from weight_transfer.format.manifest import Manifest
from weight_transfer.format.signing import SigningKey
from weight_transfer.publish.version_publisher import VersionPublisher

KEY = SigningKey.from_hex("02" * 32)


def publisher(store: ChunkStore, job: str = "job") -> VersionPublisher:
    return VersionPublisher(store, job, "trainer", KEY, chunk_bytes=256, clock=lambda: 100.0)


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "store")


def test_a_chunk_comes_back_verified_and_a_damaged_one_is_written_again(store: ChunkStore) -> None:
    name = store.put(b"hello")
    assert store.put(b"hello") == name
    assert store.get(name) == b"hello"
    assert [path.name for path in store.chunks_dir.iterdir()] == [name], "no temporary file"
    (store.chunks_dir / name).write_bytes(b"hallo")
    with pytest.raises(ChunkDigestError):
        store.get(name)
    with pytest.raises(ChunkMissingError):
        store.get("0" * 64)
    assert store.get(store.put(b"hello")) == b"hello"


def test_a_manifest_is_refused_until_every_chunk_is_durable(
    store: ChunkStore, tmp_path: Path
) -> None:
    old = model(1)
    manifest = publisher(store).publish(1, 0, old, next_model(old, 5))
    other = ChunkStore(tmp_path / "b")
    with pytest.raises(StoreError, match="not stored"):
        other.put_manifest(manifest)
    assert other.versions() == ()
    for chunk in chunks_of(store, manifest).values():
        other.put(chunk)
    other.put_manifest(manifest)
    assert other.versions() == (1,)
    assert other.get_manifest(1) == manifest


def test_a_version_is_final(store: ChunkStore) -> None:
    old = model(1)
    manifest = publisher(store).publish(1, 0, old, next_model(old, 5))
    store.put_manifest(manifest)
    with pytest.raises(StoreError, match="published already"):
        publisher(store).publish(1, 0, old, next_model(old, 6))
    assert store.get_manifest(1) == manifest
    with pytest.raises(StoreError):
        store.get_manifest(2)


def test_what_is_stored_is_its_owners_alone(tmp_path: Path) -> None:
    """Weights are the job's secret, whatever the process's umask or an older version left."""
    (tmp_path / "s" / "chunks").mkdir(parents=True, mode=0o755)
    before = os.umask(0o022)
    try:
        old, store = model(1), ChunkStore(tmp_path / "s")
        publisher(store).publish(1, 0, old, next_model(old, 5))
        with store.open_part("ab" * 32) as part:
            part.write(b"some")
        _, path = store.put(b"hello"), store.part_path("cd" * 32)
        with store.open_part(path.name) as part:
            part.write(b"more")
            store.adopt(path.name, part)
    finally:
        os.umask(before)
    folders = [tmp_path / "s" / name for name in ("chunks", "parts", "manifests")]
    files = [path for folder in folders for path in folder.iterdir()]
    assert len(files) > 3
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_the_newest_version_is_signed_anew_before_it_expires(store: ChunkStore) -> None:
    """A job whose last version is a day old still takes a replica that starts now."""
    now_s = [100.0]
    old, new = model(1), next_model(model(1), 5)
    trainer = VersionPublisher(store, "job", "t", KEY, lifetime_s=60.0, clock=lambda: now_s[0])
    first = trainer.publish(1, 0, old, new)
    trainer.publish_base(1, new)
    now_s[0] += 29.0
    assert trainer.renew() == ()
    now_s[0] += 41.0
    assert trainer.renew() == (1, 1), "its delta and its base"
    for base in (False, True):
        renewed = store.get_manifest(1, base=base)
        renewed.verify(KEY.verify_key)
        assert renewed.expires_s == now_s[0] + 60.0
    assert store.put_manifest(first).is_file(), "a copy that was signed earlier changes nothing"
    assert store.get_manifest(1).expires_s == now_s[0] + 60.0


def test_only_what_this_key_signed_for_this_job_is_signed_anew(store: ChunkStore) -> None:
    old = model(1)
    publisher(store).publish(1, 0, old, next_model(old, 5))
    late = partial(VersionPublisher, store, clock=lambda: 1e9)
    with pytest.raises(SignatureError):
        late("job", "t", SigningKey.generate()).renew()
    with pytest.raises(ManifestError, match="not of other"):
        late("other", "t", KEY).renew()


def test_a_readers_store_has_one_number_of_two_jobs(store: ChunkStore, tmp_path: Path) -> None:
    old = model(1)
    found = {}
    for job in ("a", "b", "a"):
        origin = ChunkStore(tmp_path / job / str(len(found)))
        manifest = publisher(origin, job).publish(1, 0, old, next_model(old, ord(job)))
        for chunk in chunks_of(origin, manifest).values():
            store.put(chunk)
        path = store.put_manifest(manifest, jobs=True)
        assert found.setdefault(job, path) == path
        assert Manifest.from_bytes(path.read_bytes()).job == job
    assert store.versions() == (1,)
    assert {file.path for file in store.files()} >= set(found.values())


def chained(store: ChunkStore, versions: int) -> list[dict[str, TensorBits]]:
    """Publish a base of version 1 and deltas up to `versions`; return the weights of all."""
    trainer, weights = publisher(store), [model(1)]
    trainer.publish_base(1, weights[0])
    for version in range(2, versions + 1):
        weights.append(next_model(weights[-1], version))
        trainer.publish(version, version - 1, *weights[-2:])
    return weights


@pytest.mark.parametrize("content", [b"", b"ROSE", None])
@pytest.mark.parametrize("name", ["2.manifest", "1.base.manifest"])
def test_a_damaged_manifest_costs_its_own_version_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes | None
) -> None:
    store = ChunkStore(tmp_path)
    chained(store, 3)
    path = store.manifests_dir / name
    path.write_bytes(
        (store.manifests_dir / "3.manifest").read_bytes() if content is None else content
    )
    for found in (store, ChunkStore(tmp_path)):
        for _ in range(2):
            catalog = found.catalog()
    whole = [d.version for d in catalog.deltas], [*catalog.bases]
    assert whole == (([3], [1]) if name == "2.manifest" else ([2, 3], []))
    assert [str(path) in line for line in caplog.messages] == [True, True], "once for each store"
    assert (store.damaged_files, found.damaged_files) == (1, 1)
    assert catalog.base_due(), "the newest version cannot be joined"
    store.collect((), 0.0)
    assert not path.exists()
    assert store.catalog() == catalog, "nothing is collected that the newest version may need"
    publisher(store).publish_base(4, model(9))
    assert store.collect((), 0.0) > 0
    assert (store.versions(), store.bases()) == ((), (4,))
    assert {f.name for f in store.files()} >= {
        c.id for c in store.get_manifest(4, base=True).chunks
    }


def test_a_damaged_manifest_is_replaced_when_its_version_comes_again(store: ChunkStore) -> None:
    chained(store, 1)
    whole = store.get_manifest(1, base=True)
    store.manifest_path(1, base=True).write_bytes(b"")
    store.put_manifest(whole)
    assert store.get_manifest(1, base=True) == whole


def test_files_that_are_no_manifests_are_left_alone(store: ChunkStore) -> None:
    chained(store, 2)
    for name in ("copy of 2.manifest", "x.base.manifest", "-1.manifest", "2.old.manifest"):
        (store.manifests_dir / name).write_bytes(b"x")
    assert (store.versions(), store.bases()) == ((2,), (1,))


def test_a_damaged_chunk_costs_the_versions_that_name_it(store: ChunkStore) -> None:
    chained(store, 3)
    kept, rotten = (store.get_manifest(version).chunks[0].id for version in (2, 3))
    (store.chunks_dir / rotten).write_bytes(b"\0")
    assert (store.drop(kept), store.drop(rotten)) == ((), (3,))
    assert (store.versions(), store.bases()) == ((2,), (1,))
    assert not store.has(rotten)
    assert store.damaged_files == 1


def test_a_damaged_chunk_that_is_fetched_again_is_counted(store: ChunkStore) -> None:
    kept, rotten = store.put(b"kept"), store.put(b"rotten")
    (store.chunks_dir / rotten).write_bytes(b"\0")
    assert (store.mend(kept), store.mend(rotten), store.mend(rotten)) == (False, True, False)
    assert store.damaged_files == 1


def durable(path: Path, synced: list[tuple[int, str]]) -> bool:
    """Return True if a file was synced before it had its name, and its folder after that."""
    inodes = [inode for inode, _ in synced]
    own = path.stat().st_ino
    if own not in inodes:
        return False
    at = inodes.index(own)
    return synced[at][1] != str(path) and path.parent.stat().st_ino in inodes[at:]


def test_what_is_published_survives_a_power_cut_and_what_is_fetched_is_fetched_again(
    tmp_path: Path, synced: list[tuple[int, str]]
) -> None:
    store = ChunkStore(tmp_path.resolve())
    chained(store, 2)
    whole = [file.path for file in store.files()]
    assert len(whole) > 3
    assert [path for path in whole if not durable(path, synced)] == []
    synced.clear()
    name = chunk_id(b"some")
    with store.open_part(name) as part:
        part.write(b"some")
        store.adopt(name, part)
    assert synced == []
    assert store.get(name) == b"some"
    os.truncate(store.chunks_dir / name, 0)
    assert store.mend(name)
    assert not store.has(name)


def test_a_draft_is_durable_in_its_folder(tmp_path: Path, synced: list[tuple[int, str]]) -> None:
    with draft(tmp_path / "out") as path:
        path.write_bytes(b"x")
    assert synced == [(tmp_path.stat().st_ino, str(tmp_path.resolve()))]


STEPS = 4


@pytest.fixture
def weights(store: ChunkStore) -> list[dict[str, TensorBits]]:
    """Weights of versions 0 to STEPS, of which the store has all deltas and no base."""
    weights = [model(0)]
    for version in range(1, STEPS + 1):
        weights.append(next_model(weights[-1], 10 * version))
        publisher(store).publish(version, version - 1, *weights[-2:])
    return weights


def same(found: dict[str, TensorBits], wanted: dict[str, TensorBits]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name].bits, wanted[name].bits) for name in wanted
    )


@pytest.mark.parametrize("base", [1, 3, STEPS])
def test_any_base_leads_to_the_newest_version_bit_for_bit(
    base: int, store: ChunkStore, weights: list[dict[str, TensorBits]]
) -> None:
    publisher(store).publish_base(base, weights[base])
    assert newest_version(store) == STEPS
    assert same(restore(store, STEPS), weights[STEPS])


def test_without_a_base_the_model_is_asked_for_and_proved(
    store: ChunkStore, weights: list[dict[str, TensorBits]]
) -> None:
    with pytest.raises(CatalogError, match="publish a base"):
        restore(store, STEPS)
    assert same(restore(store, STEPS, weights[0]), weights[STEPS])
    with pytest.raises(WrongBaseError, match="other weights"):
        restore(store, STEPS, weights[1])
    with pytest.raises(WrongBaseError, match="has no bias"):
        restore(store, STEPS, {name: t for name, t in weights[0].items() if name != "bias"})
    (store.chunks_dir / store.get_manifest(2).chunks[0].id).write_bytes(b"rot")
    with pytest.raises(ChunkDigestError):
        restore(store, STEPS, weights[0])


def test_going_on_from_other_weights_than_were_published_is_refused(
    store: ChunkStore, weights: list[dict[str, TensorBits]]
) -> None:
    again = publisher(store)
    with pytest.raises(WrongBaseError, match="was published as"):
        again.publish(STEPS + 1, STEPS, weights[0], weights[1])
    again.publish(STEPS + 1, STEPS, restore(store, STEPS, weights[0]), weights[1])
    assert same(restore(store, STEPS + 1, weights[0]), weights[1])
