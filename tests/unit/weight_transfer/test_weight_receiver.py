"""Whatever arrives or fails: the right weights or one clear line; the old version stays whole."""

import errno
import os
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.weight_transfer.weight_cases import (
    assert_holds,
    chunks_of,
    model,
    next_model,
    stepped,
)
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
STRANGER = SigningKey.from_hex("55" * 32)
NOW_S = 1000.0


Weights = dict[str, TensorBits]
Chunks = dict[str, bytes]


class Link:
    """A publisher and a receiver that start from the same model."""

    def __init__(self, root: Path, base: Weights | None = None) -> None:
        self.base = base or model(1)
        self.store = ChunkStore(root)
        self.receiver = Receiver(self.base)
        self.publisher = VersionPublisher(
            self.store, "job", "trainer", KEY, chunk_bytes=256, lifetime_s=60, clock=lambda: NOW_S
        )

    def publish(
        self, version: int, parent: int, old: Weights, new: Weights
    ) -> tuple[Manifest, Chunks]:
        manifest = self.publisher.publish(version, parent, old, new)
        return manifest, chunks_of(self.store, manifest)

    def publish_all(self, densities: list[float]) -> list[Weights]:
        """Publish versions 1..; return the weights of all versions."""
        models = [self.base]
        for version, density in enumerate(densities, start=1):
            models.append(next_model(models[-1], version, density))
            self.publisher.publish(version, version - 1, models[-2], models[-1])
        return models

    def stage(self, manifest: Manifest, chunks: Chunks) -> StagedUpdate:
        return self.receiver.decode(manifest, chunks, KEY.verify_key, NOW_S)

    def stage_chain(
        self, manifests: list[Manifest], store: ChunkStore | None = None
    ) -> StagedUpdate:
        """Decode a chain, of chunks in the link's own store or another."""
        chunks = chunks_of(store or self.store, *manifests)
        return self.receiver.decode_chain(manifests, chunks, KEY.verify_key, NOW_S)

    def refuses(
        self, update: tuple[Manifest, Chunks], kind: type[WeightError], words: str | None = None
    ) -> None:
        """Stage an update that is refused in one line and changes nothing."""
        with pytest.raises(kind, match=words) as caught:
            self.stage(*update)
        assert "\n" not in str(caught.value)
        assert_holds(self.receiver, self.base, 0)


@pytest.fixture
def link(tmp_path: Path) -> Link:
    return Link(tmp_path)


@pytest.fixture
def new(link: Link) -> Weights:
    return next_model(link.base, 5)


@pytest.fixture
def update(link: Link, new: Weights) -> tuple[Manifest, Chunks]:
    """Version 1, whose weights are `new`."""
    return link.publish(1, 0, link.base, new)


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


def test_a_commit_is_rerun_whether_it_ended_or_broke_off(
    link: Link, new: Weights, update: tuple[Manifest, Chunks]
) -> None:
    staged = link.stage(*update)
    first, change = staged.tensors[0], staged.tensors[0].change
    link.receiver.tensors[first.name].bits[change.indices[::2]] = change.new[::2]
    for _ in range(2):
        link.receiver.commit(staged)
        assert_holds(link.receiver, new, 1)


def test_what_was_staged_before_another_commit_is_refused(
    link: Link, update: tuple[Manifest, Chunks]
) -> None:
    staged = link.stage(*update)
    link.receiver.commit(link.stage(*link.publish(2, 0, link.base, next_model(link.base, 6))))
    with pytest.raises(WrongBaseError):
        link.receiver.commit(staged)
    assert link.receiver.version == 2


def with_tensor(manifest: Manifest, which: str, **changes: object) -> Manifest:
    def changed(one: TensorUpdate) -> TensorUpdate:
        return structs.replace(one, **changes) if one.name == which else one

    return replace(manifest, tensors=tuple(map(changed, manifest.tensors))).signed(KEY)


def test_missing_damaged_and_wrong_chunks_are_refused(
    link: Link, new: Weights, update: tuple[Manifest, Chunks]
) -> None:
    manifest, chunks = update
    name = manifest.chunks[0].id
    damaged = bytes([chunks[name][0] ^ 1]) + chunks[name][1:]
    link.refuses((manifest, chunks | {name: damaged}), ChunkDigestError)
    without = {key: chunk for key, chunk in chunks.items() if key != name}
    link.refuses((manifest, without), ChunkMissingError)
    other = hex_digest(digest_of(new["proj"].bits[::-1]))
    wrong = with_tensor(manifest, "proj", digest_after=other)
    link.refuses((wrong, chunks), DigestMismatchError)
    first, *refs = next(one.chunks for one in manifest.tensors if one.name == "proj")
    foreign = b"not a chunk"
    for name in (refs[0].id, chunk_id(foreign)):
        wrong = with_tensor(manifest, "proj", chunks=(structs.replace(first, id=name), *refs))
        link.refuses((wrong, chunks | {chunk_id(foreign): foreign}), ChunkFormatError)


@pytest.mark.parametrize(
    ("tensor", "changes", "kind", "words"),
    [
        ("bias", {"name": "biases"}, ManifestError, "differ in 2 tensors: .'bias', 'biases'"),
        (
            "proj",
            {"shape": (30, 4, 4)},
            ManifestError,
            r"proj: manifest says bfloat16 \(30, 4, 4\)",
        ),
        ("proj", {"dtype": "float16"}, ManifestError, r"proj: manifest says float16 \(30, 16\)"),
        ("frozen", {"dtype": "float16"}, ManifestError, "frozen: manifest says float16"),
        ("proj", {"digest_before": "0" * 16}, WrongBaseError, "proj: version was made for other"),
        ("", {"version": 9, "parent": 8}, WrongBaseError, "version 9 builds on 8, active is 0"),
        ("", {"codec": "other"}, ManifestError, "codec other is unknown here"),
        ("", {"expires_s": NOW_S}, ManifestExpired, "fetch the newest"),
    ],
)
def test_what_does_not_fit_is_one_line_and_the_old_version_stays(
    link: Link,
    update: tuple[Manifest, Chunks],
    tensor: str,
    changes: dict[str, Any],
    kind: type[WeightError],
    words: str,
) -> None:
    manifest, chunks = update
    wrong = with_tensor(manifest, tensor, **changes) if tensor else replace(manifest, **changes)
    link.refuses((wrong.signed(KEY), chunks), kind, words)
    link.receiver.commit(link.stage(manifest, chunks))
    assert link.receiver.version == 1


def test_a_missing_tensor_and_a_missing_or_foreign_signature_are_refused(
    link: Link, update: tuple[Manifest, Chunks]
) -> None:
    manifest, chunks = update
    fewer = replace(manifest, tensors=manifest.tensors[1:]).signed(KEY)
    link.refuses((fewer, chunks), ManifestError, "differ in 1 tensors: .'bias'")
    for unsigned in (replace(manifest, signature=b""), manifest.signed(STRANGER)):
        link.refuses((unsigned, chunks), SignatureError, "trainer")
    with pytest.raises(SignatureError):
        replace(manifest, job="other").verify(KEY.verify_key)


def test_the_publisher_refuses_what_is_no_step(link: Link) -> None:
    fewer = {name: bits for name, bits in link.base.items() if name != "bias"}
    reshaped = link.base | {"proj": replace(link.base["proj"], shape=(16, 30))}
    for parent, weights in ((1, link.base), (0, fewer), (0, reshaped)):
        with pytest.raises(ManifestError):
            link.publish(1, parent, link.base, weights)
    assert link.store.versions() == ()


def test_the_receiver_keeps_its_own_copy(link: Link) -> None:
    link.base["proj"].bits[:] = stepped(link.base["proj"], 9, 1.0).bits
    assert_holds(link.receiver, model(1), 0)


@given(
    st.lists(st.sampled_from([0.0, 0.02, 0.4, 1.0]), min_size=1, max_size=5),
    st.data(),
)
def test_whoever_joins_or_lags_ends_bit_exactly_in_one_fold(
    tmp_path_factory: pytest.TempPathFactory, densities: list[float], data: st.DataObject
) -> None:
    link = Link(tmp_path_factory.mktemp("link"))
    models = link.publish_all(densities)
    newest = len(densities)
    at = data.draw(st.integers(1, newest))
    link.publisher.publish_base(at, models[at])
    manifests = [link.store.get_manifest(at, base=True)]
    if data.draw(st.booleans()):
        at, manifests = 0, []
    manifests += [link.store.get_manifest(version) for version in range(at + 1, newest + 1)]
    staged = link.stage_chain(manifests)
    assert_holds(link.receiver, link.base, 0)
    names = [tensor.name for tensor in staged.tensors]
    assert len(set(names)) == len(names), "each tensor once"
    link.receiver.commit(staged)
    assert_holds(link.receiver, models[-1], newest)


def test_a_pruned_chain_is_not_replayed_on_the_wrong_base(link: Link) -> None:
    """Others' known pain: version 2 applied to version 0, since 1 was deleted."""
    link.publish_all([0.1, 0.1])
    second = link.store.get_manifest(2)
    with pytest.raises(WrongBaseError, match="builds on 1, active is 0"):
        link.stage_chain([second])
    assert_holds(link.receiver, link.base, 0)


def test_a_base_does_not_take_a_receiver_back(link: Link) -> None:
    models = link.publish_all([0.1, 0.1])
    link.receiver.commit(link.stage_chain([link.store.get_manifest(v) for v in (1, 2)]))
    base = link.publisher.publish_base(1, models[1])
    with pytest.raises(WrongBaseError):
        link.stage_chain([base])


def test_a_trainer_that_resumed_with_other_weights_than_it_published_is_found(link: Link) -> None:
    """Others' known pain: a resumed trainer diffs against weights that nobody has."""
    models = link.publish_all([0.1])
    link.receiver.commit(link.stage_chain([link.store.get_manifest(1)]))
    strayed = next_model(models[1], 77, 0.1)
    manifest, chunks = link.publish(2, 1, strayed, next_model(strayed, 78, 0.1))
    with pytest.raises((DigestMismatchError, WrongBaseError)):
        link.stage(manifest, chunks)
    assert_holds(link.receiver, models[1], 1)


def test_what_nobody_needs_is_deleted_and_nothing_else(link: Link) -> None:
    models = link.publish_all([0.3] * 4)
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
        chunks_of(link.store, link.store.get_manifest(version))
    link.store.put(b"a chunk of a version that is being published")
    link.store.collect([], NOW_S)
    assert link.store.versions() == (4,)
    assert link.store.has(chunk_id(b"a chunk of a version that is being published"))


def test_only_a_base_leads_from_one_jobs_weights_to_anothers(link: Link, tmp_path: Path) -> None:
    mine = link.publish_all([0.2] * 3)
    link.receiver.commit(link.stage_chain([link.store.get_manifest(v) for v in (1, 2, 3)]))
    assert (link.receiver.job, link.receiver.version) == ("job", 3)
    store = ChunkStore(tmp_path / "theirs")
    theirs = VersionPublisher(store, "other", "trainer", KEY)
    other = next_model(link.base, 9)
    base, first = theirs.publish_base(0, link.base), theirs.publish(1, 0, link.base, other)
    # The version follows and was made for these weights, but it is another job's.
    stolen = theirs.publish(4, 3, mine[-1], other)
    for chain in ([first], [stolen]):
        with pytest.raises(WrongBaseError, match="active are job's"):
            link.stage_chain(chain, store)
    with pytest.raises(ManifestError, match="several jobs"):
        link.receiver.decode_chain([link.store.get_manifest(3), stolen], {}, KEY.verify_key, NOW_S)
    assert_holds(link.receiver, mine[-1], 3)
    link.receiver.commit(link.stage_chain([base, first], store))
    assert link.receiver.job == "other"
    assert_holds(link.receiver, other, 1)
    # A number of one job says nothing of the same number of another.
    again = link.publisher.publish_base(1, mine[1])
    link.receiver.commit(link.stage_chain([again]))
    assert link.receiver.job == "job"
    assert_holds(link.receiver, mine[1], 1)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("call", ["tempfile.mkstemp", "os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("good", [0, 5])
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

    module, _, name = call.rpartition(".")
    with monkeypatch.context() as patched:
        patched.setattr(call, failing(getattr(pkgutil.resolve_name(module), name)))
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
        link.receiver.commit(link.stage_chain([manifest]))
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
