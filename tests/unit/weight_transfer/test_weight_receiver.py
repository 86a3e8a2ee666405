"""Whatever arrives or fails: the right weights or one clear line; the old version stays whole."""

import errno
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from weight_cases import model, next_model, stepped, tensor

from weight_transfer.apply.receiver import Receiver, StagedUpdate
from weight_transfer.catalog import ReaderPin
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import (
    ChunkDigestError,
    ChunkFormatError,
    ChunkMissingError,
    DigestMismatchError,
    ManifestError,
    ManifestExpired,
    SignatureError,
    StoreError,
    WeightError,
    WrongBaseError,
)
from weight_transfer.format.chunk import chunk_id
from weight_transfer.format.digest import digest_of
from weight_transfer.format.manifest import Manifest, TensorUpdate, hex_digest
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import TensorBits
from weight_transfer.publish.version_publisher import VersionPublisher

KEY = SigningKey.from_hex("03" * 32)
NOW_S = 1000.0


class Link:
    """A publisher and a receiver that start from the same model."""

    def __init__(self, root: Path, base: dict[str, TensorBits] | None = None) -> None:
        self.base = base or model(1)
        self.store = ChunkStore(root)
        self.receiver = Receiver(self.base)
        self.publisher = VersionPublisher(
            self.store, "job", "trainer", KEY, chunk_bytes=256, lifetime_s=60, clock=lambda: NOW_S
        )

    def publish(
        self, version: int, parent: int, old: dict[str, TensorBits], new: dict[str, TensorBits]
    ) -> tuple[Manifest, dict[str, bytes]]:
        manifest = self.publisher.publish(version, parent, old, new)
        return manifest, {chunk.id: self.store.get(chunk.id) for chunk in manifest.chunks}

    def stage(
        self, manifest: Manifest, chunks: dict[str, bytes], now_s: float = NOW_S
    ) -> StagedUpdate:
        return self.receiver.decode(manifest, chunks, KEY.verify_key, now_s)


@pytest.fixture
def link(tmp_path: Path) -> Link:
    return Link(tmp_path)


def assert_holds(receiver: Receiver, tensors: dict[str, TensorBits], version: int) -> None:
    assert receiver.version == version
    for name, wanted in tensors.items():
        np.testing.assert_array_equal(receiver.tensors[name].bits, wanted.bits)
        assert receiver.digests[name] == digest_of(wanted.bits)


@given(st.lists(st.sampled_from([0.0, 0.02, 0.4, 1.0]), min_size=1, max_size=4))
def test_a_chain_of_versions_arrives_bit_exactly(
    tmp_path_factory: pytest.TempPathFactory, densities: list[float]
) -> None:
    link = Link(tmp_path_factory.mktemp("link"))
    active = link.base
    for version, density in enumerate(densities, start=1):
        new = next_model(active, version, density)
        staged = link.stage(*link.publish(version, version - 1, active, new))
        assert_holds(link.receiver, active, version - 1)
        link.receiver.commit(staged)
        assert_holds(link.receiver, new, version)
        active = new


def test_committing_again_changes_nothing(link: Link) -> None:
    new = next_model(link.base, 5)
    staged = link.stage(*link.publish(1, 0, link.base, new))
    link.receiver.commit(staged)
    link.receiver.commit(staged)
    assert_holds(link.receiver, new, 1)


def test_a_commit_that_broke_off_is_rerun(link: Link) -> None:
    new = next_model(link.base, 5)
    staged = link.stage(*link.publish(1, 0, link.base, new))
    first, change = staged.tensors[0], staged.tensors[0].change
    link.receiver.tensors[first.name].bits[change.indices[::2]] = change.new[::2]
    link.receiver.commit(staged)
    assert_holds(link.receiver, new, 1)


def test_what_was_staged_before_another_commit_is_refused(link: Link) -> None:
    update = link.publish(1, 0, link.base, next_model(link.base, 5))
    staged = link.stage(*update)
    other = link.stage(*link.publish(2, 0, link.base, next_model(link.base, 6)))
    link.receiver.commit(other)
    with pytest.raises(WrongBaseError):
        link.receiver.commit(staged)
    assert link.receiver.version == 2


def test_missing_and_damaged_chunks_are_refused(link: Link) -> None:
    manifest, chunks = link.publish(1, 0, link.base, next_model(link.base, 5))
    name = manifest.chunks[0].id
    damaged = bytes([chunks[name][0] ^ 1]) + chunks[name][1:]
    with pytest.raises(ChunkDigestError):
        link.stage(manifest, chunks | {name: damaged})
    with pytest.raises(ChunkMissingError):
        link.stage(manifest, {k: v for k, v in chunks.items() if k != name})
    assert_holds(link.receiver, link.base, 0)


def resigned(manifest: Manifest, position: int, **changes: Any) -> Manifest:
    tensors = list(manifest.tensors)
    tensors[position] = structs.replace(tensors[position], **changes)
    return replace(manifest, tensors=tuple(tensors)).signed(KEY)


def test_a_well_formed_but_wrong_chunk_is_caught_by_the_digest(link: Link) -> None:
    new = next_model(link.base, 5)
    manifest, chunks = link.publish(1, 0, link.base, new)
    position = [tensor.name for tensor in manifest.tensors].index("proj")
    wrong = resigned(manifest, position, digest_after=hex_digest(digest_of(new["proj"].bits[::-1])))
    with pytest.raises(DigestMismatchError):
        link.stage(wrong, chunks)
    assert_holds(link.receiver, link.base, 0)


def test_a_chunk_in_the_place_of_another_is_refused(link: Link) -> None:
    manifest, chunks = link.publish(1, 0, link.base, next_model(link.base, 5))
    position = [tensor.name for tensor in manifest.tensors].index("proj")
    refs = list(manifest.tensors[position].chunks)
    refs[0] = structs.replace(refs[0], id=refs[1].id)
    with pytest.raises(ChunkFormatError):
        link.stage(resigned(manifest, position, chunks=tuple(refs)), chunks)
    foreign = b"not a chunk"
    refs[0] = structs.replace(refs[0], id=chunk_id(foreign))
    wrong = resigned(manifest, position, chunks=tuple(refs))
    with pytest.raises(ChunkFormatError):
        link.stage(wrong, chunks | {refs[0].id: foreign})


def with_tensor(manifest: Manifest, which: str, **changes: object) -> Manifest:
    def changed(one: TensorUpdate) -> TensorUpdate:
        return structs.replace(one, **changes) if one.name == which else one

    return replace(manifest, tensors=tuple(map(changed, manifest.tensors))).signed(KEY)


WRONG: dict[str, tuple[Callable[[Manifest], Manifest], float, type[WeightError], str]] = {
    "a tensor of another name": (
        lambda m: with_tensor(m, "bias", name="biases"),
        NOW_S,
        ManifestError,
        "differ in 2 tensors: .'bias', 'biases'",
    ),
    "a tensor less": (
        lambda m: replace(m, tensors=m.tensors[1:]).signed(KEY),
        NOW_S,
        ManifestError,
        "differ in 1 tensors: .'bias'",
    ),
    "another shape": (
        lambda m: with_tensor(m, "proj", shape=(30, 4, 4)),
        NOW_S,
        ManifestError,
        r"proj: manifest says bfloat16 \(30, 4, 4\)",
    ),
    "another dtype": (
        lambda m: with_tensor(m, "proj", dtype="float16"),
        NOW_S,
        ManifestError,
        r"proj: manifest says float16 \(30, 16\)",
    ),
    "another dtype of a tensor that did not change": (
        lambda m: with_tensor(m, "frozen", dtype="float16"),
        NOW_S,
        ManifestError,
        "frozen: manifest says float16",
    ),
    "other weights before": (
        lambda m: with_tensor(m, "proj", digest_before="0" * 16),
        NOW_S,
        WrongBaseError,
        "proj: version was made for other weights",
    ),
    "another parent": (
        lambda m: replace(m, version=9, parent=8).signed(KEY),
        NOW_S,
        WrongBaseError,
        "version 9 builds on 8, active is 0",
    ),
    "another codec": (
        lambda m: replace(m, codec="other").signed(KEY),
        NOW_S,
        ManifestError,
        "codec other is unknown here",
    ),
    "no signature": (lambda m: replace(m, signature=b""), NOW_S, SignatureError, "trainer"),
    "another's signature": (
        lambda m: m.signed(SigningKey.from_hex("55" * 32)),
        NOW_S,
        SignatureError,
        "trainer",
    ),
    "its time is over": (lambda m: m, NOW_S + 60, ManifestExpired, "fetch the newest"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_line_and_the_old_version_stays(link: Link, case: str) -> None:
    spoil, now_s, kind, words = WRONG[case]
    manifest, chunks = link.publish(1, 0, link.base, next_model(link.base, 5))
    with pytest.raises(kind, match=words) as caught:
        link.stage(spoil(manifest), chunks, now_s)
    assert "\n" not in str(caught.value)
    assert_holds(link.receiver, link.base, 0)
    link.receiver.commit(link.stage(manifest, chunks))
    assert link.receiver.version == 1


def test_the_publisher_refuses_what_is_no_step(link: Link) -> None:
    with pytest.raises(ManifestError):
        link.publish(1, 1, link.base, link.base)
    with pytest.raises(ManifestError):
        link.publish(1, 0, link.base, {k: v for k, v in link.base.items() if k != "bias"})
    reshaped = replace(link.base["proj"], shape=(16, 30))
    with pytest.raises(ManifestError):
        link.publish(1, 0, link.base, link.base | {"proj": reshaped})
    assert link.store.versions() == ()


def test_the_receiver_keeps_its_own_copy(link: Link) -> None:
    link.base["proj"].bits[:] = stepped(link.base["proj"], 9, 1.0).bits
    assert_holds(link.receiver, model(1), 0)


def publish_all(link: Link, densities: list[float]) -> list[dict[str, TensorBits]]:
    """Versions 1.. of the job, each published; returns the weights of all versions."""
    models = [link.base]
    for version, density in enumerate(densities, start=1):
        models.append(next_model(models[-1], version, density))
        link.publisher.publish(version, version - 1, models[-2], models[-1])
    return models


def chunks_of(
    link: Link, manifests: list[Manifest], store: ChunkStore | None = None
) -> dict[str, bytes]:
    """Return all chunks of manifests, from the link's own store or another."""
    store = store or link.store
    return {chunk.id: store.get(chunk.id) for each in manifests for chunk in each.chunks}


def receive(link: Link, manifests: list[Manifest], store: ChunkStore | None = None) -> None:
    """Decode a chain and make it the active version."""
    chunks = chunks_of(link, manifests, store)
    chain = link.receiver.decode_chain(manifests, chunks, KEY.verify_key, NOW_S)
    link.receiver.commit(chain)


@given(
    st.lists(st.sampled_from([0.0, 0.02, 0.4, 1.0]), min_size=1, max_size=5),
    st.data(),
)
def test_whoever_joins_or_lags_ends_bit_exactly_in_one_fold(
    tmp_path_factory: pytest.TempPathFactory, densities: list[float], data: st.DataObject
) -> None:
    link = Link(tmp_path_factory.mktemp("link"))
    models = publish_all(link, densities)
    newest = len(densities)
    at = data.draw(st.integers(1, newest))
    link.publisher.publish_base(at, models[at])
    way = data.draw(st.sampled_from(["chain", "base"]))
    if way == "base":
        manifests = [link.store.get_manifest(at, base=True)]
        manifests += [link.store.get_manifest(v) for v in range(at + 1, newest + 1)]
    else:
        manifests = [link.store.get_manifest(v) for v in range(1, newest + 1)]
    staged = link.receiver.decode_chain(
        manifests, chunks_of(link, manifests), KEY.verify_key, NOW_S
    )
    assert_holds(link.receiver, link.base, 0)
    names = [tensor.name for tensor in staged.tensors]
    assert len(set(names)) == len(names), "each tensor once"
    link.receiver.commit(staged)
    assert_holds(link.receiver, models[-1], newest)


def test_a_pruned_chain_is_not_replayed_on_the_wrong_base(link: Link) -> None:
    """Others' known pain: version 2 applied to version 0, since 1 was deleted."""
    publish_all(link, [0.1, 0.1])
    second = link.store.get_manifest(2)
    with pytest.raises(WrongBaseError, match="builds on 1, active is 0"):
        link.receiver.decode_chain([second], chunks_of(link, [second]), KEY.verify_key, NOW_S)
    assert_holds(link.receiver, link.base, 0)


def test_a_base_does_not_take_a_receiver_back(link: Link) -> None:
    models = publish_all(link, [0.1, 0.1])
    receive(link, [link.store.get_manifest(v) for v in (1, 2)])
    base = link.publisher.publish_base(1, models[1])
    with pytest.raises(WrongBaseError):
        link.stage(base, chunks_of(link, [base]))


def test_a_trainer_that_resumed_with_other_weights_than_it_published_is_found(link: Link) -> None:
    """Others' known pain: a resumed trainer diffs against weights that nobody has."""
    models = publish_all(link, [0.1])
    receive(link, [link.store.get_manifest(1)])
    strayed = next_model(models[1], 77, 0.1)
    manifest, chunks = link.publish(2, 1, strayed, next_model(strayed, 78, 0.1))
    with pytest.raises((DigestMismatchError, WrongBaseError)):
        link.stage(manifest, chunks)
    assert_holds(link.receiver, models[1], 1)


def test_what_nobody_needs_is_deleted_and_nothing_else(link: Link) -> None:
    models = publish_all(link, [0.3] * 4)
    link.publisher.publish_base(0, models[0])
    link.publisher.publish_base(3, models[3])
    before = sum(file.size for file in link.store.files())
    lagging = [ReaderPin("reader", 2, NOW_S + 1)]
    link.store.collect(lagging, NOW_S)
    assert link.store.versions() == (3, 4)
    assert link.store.bases() == (3,)
    freed = before - sum(file.size for file in link.store.files())
    assert freed > 0
    for version in link.store.versions():
        chunks_of(link, [link.store.get_manifest(version)])
    link.store.put(b"a chunk of a version that is being published")
    link.store.collect([], NOW_S)
    assert link.store.versions() == (4,)
    assert link.store.has(chunk_id(b"a chunk of a version that is being published"))


def other_jobs(folder: Path, job: str = "other") -> tuple[VersionPublisher, ChunkStore]:
    store = ChunkStore(folder)
    return VersionPublisher(store, job, "trainer", KEY), store


def test_only_a_base_leads_from_one_jobs_weights_to_anothers(link: Link, tmp_path: Path) -> None:
    mine = [next_model(link.base, seed) for seed in (5, 6, 7)]
    for version, (old, new) in enumerate(zip([link.base, *mine], mine, strict=False), start=1):
        link.receiver.commit(link.stage(*link.publish(version, version - 1, old, new)))
    assert (link.receiver.job, link.receiver.version) == ("job", 3)
    theirs, store = other_jobs(tmp_path / "theirs")
    other = next_model(link.base, 9)
    base, first = theirs.publish_base(0, link.base), theirs.publish(1, 0, link.base, other)
    # The version follows and was made for these weights, but it is another job's.
    stolen = theirs.publish(4, 3, mine[-1], other)
    for chain in ([first], [stolen]):
        with pytest.raises(WrongBaseError, match="active are job's"):
            link.receiver.decode_chain(chain, chunks_of(link, chain, store), KEY.verify_key, NOW_S)
    assert_holds(link.receiver, mine[-1], 3)
    receive(link, [base, first], store)
    assert link.receiver.job == "other"
    assert_holds(link.receiver, other, 1)


def test_the_same_number_of_another_job_is_another_version(link: Link, tmp_path: Path) -> None:
    mine, other = next_model(link.base, 5), next_model(link.base, 9)
    link.receiver.commit(link.stage(*link.publish(1, 0, link.base, mine)))
    theirs, store = other_jobs(tmp_path / "theirs")
    base = theirs.publish_base(1, other)
    receive(link, [base], store)
    assert_holds(link.receiver, other, 1)


def test_one_update_is_of_one_job(link: Link, tmp_path: Path) -> None:
    new = next_model(link.base, 5)
    first, _ = link.publish(1, 0, link.base, new)
    theirs, _ = other_jobs(tmp_path / "theirs")
    second = theirs.publish(2, 1, new, next_model(link.base, 6))
    with pytest.raises(ManifestError, match="several jobs"):
        link.receiver.decode_chain([first, second], {}, KEY.verify_key, NOW_S)


def test_a_signature_is_for_one_job_only(link: Link) -> None:
    manifest, _ = link.publish(1, 0, link.base, next_model(link.base, 5))
    with pytest.raises(SignatureError):
        replace(manifest, job="other").verify(KEY.verify_key)


def filled(old: TensorBits, seed: int) -> TensorBits:
    """Nothing but NaNs, quiet and signalling, of both signs and of many payloads."""
    rng = np.random.default_rng(seed)
    payloads = rng.integers(1, 0x80, old.bits.size, dtype="<u2")
    bits = 0x7F80 | payloads | rng.integers(0, 2, old.bits.size, dtype="<u2") << 15
    assert np.isnan((bits.astype("<u4") << 16).view("<f4")).all()
    return TensorBits(old.name, old.dtype, old.shape, bits.astype("<u2"))


@pytest.mark.parametrize("kind", ["nan", "half", "all", "to zero"])
def test_an_update_of_nearly_everything_is_carried(tmp_path: Path, kind: str) -> None:
    old = {"w": tensor("w", (300, 70), 1), "norm": tensor("norm", (70,), 2)}
    if kind == "nan":
        new = {name: filled(one, 7) for name, one in old.items()}
    elif kind == "to zero":
        new = {n: TensorBits(n, t.dtype, t.shape, t.bits * 0) for n, t in old.items()}
    else:
        new = next_model(old, 3, 0.5 * 7 / 6 if kind == "half" else 1.0)
    link = Link(tmp_path, old)
    for version, (before, after) in enumerate([(old, new), (new, old)], start=1):
        manifest, chunks = link.publish(version, version - 1, before, after)
        if kind == "half":
            assert 0.45 < manifest.changed / (300 * 70 + 70) < 0.55
        link.receiver.commit(link.stage(manifest, chunks))
        assert_holds(link.receiver, after, version)
        dense = sum(one.bits.nbytes for one in old.values())
        assert manifest.wire_bytes <= dense + len(manifest.chunks) * (64 + 2 * 5)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("call", ["mkstemp", "fsync", "replace"])
@pytest.mark.parametrize("good", [0, 1, 5])
def test_a_full_disk_leaves_no_half_file_and_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, good: int
) -> None:
    """The disk is full after some writes, at each step of one."""
    link = Link(tmp_path)
    store, publisher = link.store, link.publisher
    new, newer = next_model(link.base, 5), next_model(link.base, 6)
    first = publisher.publish(1, 0, link.base, new)
    kept = files(tmp_path)
    left = good

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def work(*args: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        return work

    place = {"mkstemp": "tempfile.mkstemp", "fsync": "os.fsync", "replace": "pathlib.Path.replace"}
    real = {"mkstemp": tempfile.mkstemp, "fsync": os.fsync, "replace": Path.replace}
    with monkeypatch.context() as patched:
        patched.setattr(place[call], failing(real[call]))
        with pytest.raises(StoreError, match="No space left on device; make room") as caught:
            publisher.publish(2, 1, new, newer)
    assert "\n" not in str(caught.value)
    assert not [name for name in files(tmp_path) if ".tmp-" in name]
    assert store.versions() == (1,)
    assert set(kept) <= set(files(tmp_path))
    for file in store.files():
        if file.path.parent == store.chunks_dir:
            store.get(file.name)
    second = publisher.publish(2, 1, new, newer)
    for manifest, wanted in ((first, new), (second, newer)):
        link.receiver.commit(link.stage(manifest, chunks_of(link, [manifest])))
        assert_holds(link.receiver, wanted, manifest.version)


def test_a_full_disk_at_the_manifest_publishes_nothing(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, new = Path.replace, next_model(link.base, 5)

    def replaced(path: Path, target: Path) -> Path:
        if target.parent == link.store.manifests_dir:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, target)

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", replaced)
        with pytest.raises(StoreError, match="manifests does not take"):
            link.publisher.publish(1, 0, link.base, new)
    assert link.store.versions() == ()
    assert list(link.store.manifests_dir.iterdir()) == []
    assert link.publisher.publish(1, 0, link.base, new).version == 1
