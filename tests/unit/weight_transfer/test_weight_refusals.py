"""Whatever arrives or fails: the right weights or one clear line; the old version stays whole."""

import errno
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from weight_cases import model, next_model, tensor

from weight_transfer.apply.receiver import Receiver
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import (
    ManifestError,
    ManifestExpired,
    SignatureError,
    StoreError,
    WeightError,
    WrongBaseError,
)
from weight_transfer.format.digest import digest_of
from weight_transfer.format.manifest import Manifest, TensorUpdate
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import TensorBits
from weight_transfer.publish.version_publisher import VersionPublisher

KEY = SigningKey.from_hex("05" * 32)
NOW_S = 50.0
Model = dict[str, TensorBits]


def publisher(store: ChunkStore, key: SigningKey = KEY) -> VersionPublisher:
    return VersionPublisher(
        store, "job", "t", key, chunk_bytes=256, lifetime_s=60, clock=lambda: NOW_S
    )


def assert_whole(receiver: Receiver, wanted: Model, version: int) -> None:
    assert receiver.version == version
    for name, one in wanted.items():
        np.testing.assert_array_equal(receiver.tensors[name].bits, one.bits)
        assert receiver.digests[name] == digest_of(one.bits)


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
def test_what_does_not_fit_is_one_line_and_the_old_version_stays(tmp_path: Path, case: str) -> None:
    spoil, now_s, kind, words = WRONG[case]
    old, store = model(1), ChunkStore(tmp_path)
    receiver = Receiver(old)
    manifest = publisher(store).publish(1, 0, old, next_model(old, 5))
    chunks = {chunk.id: store.get(chunk.id) for chunk in manifest.chunks}
    with pytest.raises(kind, match=words) as caught:
        receiver.decode(spoil(manifest), chunks, KEY.verify_key, now_s)
    assert "\n" not in str(caught.value)
    assert_whole(receiver, old, 0)
    receiver.commit(receiver.decode(manifest, chunks, KEY.verify_key, NOW_S))
    assert receiver.version == 1


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
    store, receiver = ChunkStore(tmp_path), Receiver(old)
    publishing = publisher(store)
    for version, (before, after) in enumerate([(old, new), (new, old)], start=1):
        manifest = publishing.publish(version, version - 1, before, after)
        if kind == "half":
            assert 0.45 < manifest.changed / (300 * 70 + 70) < 0.55
        chunks = {chunk.id: store.get(chunk.id) for chunk in manifest.chunks}
        receiver.commit(receiver.decode(manifest, chunks, KEY.verify_key, NOW_S))
        assert_whole(receiver, after, version)
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
    old = model(1)
    new, newer = next_model(old, 5), next_model(old, 6)
    store, receiver = ChunkStore(tmp_path), Receiver(old)
    publishing = publisher(store)
    first = publishing.publish(1, 0, old, new)
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
            publishing.publish(2, 1, new, newer)
    assert "\n" not in str(caught.value)
    assert not [name for name in files(tmp_path) if ".tmp-" in name]
    assert store.versions() == (1,)
    assert set(kept) <= set(files(tmp_path))
    for file in store.files():
        if file.path.parent == store.chunks_dir:
            store.get(file.name)
    second = publishing.publish(2, 1, new, newer)
    for manifest, wanted in ((first, new), (second, newer)):
        chunks = {chunk.id: store.get(chunk.id) for chunk in manifest.chunks}
        receiver.commit(receiver.decode(manifest, chunks, KEY.verify_key, NOW_S))
        assert_whole(receiver, wanted, manifest.version)


def test_a_full_disk_at_the_manifest_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, store = model(1), ChunkStore(tmp_path)
    real = Path.replace

    def replaced(path: Path, target: Path) -> Path:
        if target.parent == store.manifests_dir:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, target)

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", replaced)
        with pytest.raises(StoreError, match="manifests does not take"):
            publisher(store).publish(1, 0, old, next_model(old, 5))
    assert store.versions() == ()
    assert list(store.manifests_dir.iterdir()) == []
    assert publisher(store).publish(1, 0, old, next_model(old, 5)).version == 1
