"""A version that was published comes back out of its store, bit for bit, or not at all."""

from pathlib import Path

import numpy as np
import pytest
from weight_cases import model, next_model

from weight_transfer import (
    CatalogError,
    ChunkDigestError,
    ChunkStore,
    SigningKey,
    TensorBits,
    VersionPublisher,
    WrongBaseError,
    newest_version,
    restore,
)

KEY = SigningKey.generate()
STEPS = 4


def published(root: Path, first: int = 0) -> tuple[ChunkStore, list[dict[str, TensorBits]]]:
    """A store of STEPS deltas after version `first`, and the weights of each version."""
    store = ChunkStore(root)
    publisher = VersionPublisher(store, "job", "trainer", KEY, chunk_bytes=512)
    weights = [model(0)]
    for step in range(1, STEPS + 1):
        weights.append(next_model(weights[-1], 10 * step))
        publisher.publish(first + step, first + step - 1, weights[-2], weights[-1])
    return store, weights


def same(found: dict[str, TensorBits], wanted: dict[str, TensorBits]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name].bits, wanted[name].bits) for name in wanted
    )


@pytest.mark.parametrize("base", [1, 3, STEPS])
def test_any_base_leads_to_the_newest_version_bit_for_bit(base: int, tmp_path: Path) -> None:
    store, weights = published(tmp_path)
    VersionPublisher(store, "job", "trainer", KEY).publish_base(base, weights[base])
    assert newest_version(store) == STEPS
    assert same(restore(store, STEPS), weights[STEPS])


def test_without_a_base_the_model_is_asked_for_and_proved(tmp_path: Path) -> None:
    store, weights = published(tmp_path)
    with pytest.raises(CatalogError, match="publish a base"):
        restore(store, STEPS)
    assert same(restore(store, STEPS, weights[0]), weights[STEPS])
    with pytest.raises(WrongBaseError, match="other weights"):
        restore(store, STEPS, weights[1])
    with pytest.raises(WrongBaseError, match="has no bias"):
        restore(store, STEPS, {name: t for name, t in weights[0].items() if name != "bias"})


def test_a_damaged_chunk_is_found_and_nothing_is_restored(tmp_path: Path) -> None:
    store, weights = published(tmp_path)
    chunk = next(iter(store.get_manifest(2).chunks))
    (store.chunks_dir / chunk.id).write_bytes(b"rot")
    with pytest.raises(ChunkDigestError):
        restore(store, STEPS, weights[0])


def test_going_on_from_other_weights_than_were_published_is_refused(tmp_path: Path) -> None:
    store, weights = published(tmp_path)
    again = VersionPublisher(store, "job", "trainer", KEY)
    with pytest.raises(WrongBaseError, match="was published as"):
        again.publish(STEPS + 1, STEPS, weights[0], weights[1])
    again.publish(STEPS + 1, STEPS, restore(store, STEPS, weights[0]), weights[1])
    assert same(restore(store, STEPS + 1, weights[0]), weights[1])
