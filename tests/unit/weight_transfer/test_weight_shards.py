"""Ranks encode pieces of every checkpoint tensor; a coordinator publishes all or nothing."""

import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from shard_cases import (
    KEY,
    Shape,
    ShardedTrainer,
    cut,
    dense,
    pieces,
    publisher_of,
    rows_only,
    weights,
)

from tests.unit.weight_transfer.weight_cases import assert_holds, next_model, stepped, tensor
from weight_transfer.apply.receiver import Receiver
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import (
    ChunkMissingError,
    ManifestError,
    ShardError,
    StoreError,
    TensorFormatError,
)
from weight_transfer.format.digest import digest_of, tiling_fault
from weight_transfer.format.manifest import Manifest, hex_digest
from weight_transfer.format.tensors import TensorBits, bits_of
from weight_transfer.publish.sharding import (
    Heads,
    LocalBits,
    Piece,
    column_shard,
    first_holders,
    gate_up,
    grouped_qkv,
    piece,
    row_shard,
    share,
    whole,
)
from weight_transfer.publish.shards import (
    ShardCoordinator,
    ShardEncoder,
    ShardReport,
    ShardSettings,
    check_fit,
    hold,
)
from weight_transfer.torch import local_weights


def faults(shapes: dict[str, tuple[int, ...]], found: Iterable[Piece]) -> dict[str, str]:
    blocks: dict[str, list] = {name: [] for name in shapes}
    for one in found:
        blocks[one.tensor].append((one.block.rows, one.block.columns))
    return {
        name: tiling_fault(
            shape[0],
            int(np.prod(shape[1:])),
            sorted(blocks[name], key=lambda b: (b[0][0], b[1][0])),
        )
        for name, shape in shapes.items()
    }


@st.composite
def shapes_and_ranks(draw: st.DrawFn) -> tuple[Shape, int]:
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    kv = draw(st.sampled_from([1, 2, 4, 8, 16]))
    vocabulary = draw(st.integers(1, 40))
    padded = -(-vocabulary // ranks) * ranks + ranks * draw(st.integers(0, 2))
    shape = Shape(
        hidden=draw(st.integers(1, 7)),
        heads=kv * ranks * draw(st.integers(1, 2)),
        kv=kv,
        dim=draw(st.integers(1, 3)),
        ffn=ranks * draw(st.integers(1, 3)),
        vocabulary=vocabulary,
        padded=padded,
        experts=ranks * draw(st.integers(1, 2)),
    )
    return shape, ranks


@given(shapes_and_ranks())
def test_pieces_of_all_ranks_tile_the_checkpoint_and_find_its_weights(
    case: tuple[Shape, int],
) -> None:
    shape, ranks = case
    model = dense(shape, 1)
    found = [pieces(shape, rank, ranks) for rank in range(ranks)]
    every = faults(shape.shapes, (one for some in found for one in some))
    assert every == dict.fromkeys(shape.shapes, "")
    for rank, some in enumerate(found):
        for part in hold(some, weights(cut(shape, model, rank, ranks)), 16):
            np.testing.assert_array_equal(part.bits, part.block.cut(model[part.tensor].bits))


@given(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=0, max_size=3))
def test_uneven_rows_tile_too(ranks: int, dims: list[int]) -> None:
    model = {"t": tensor("t", tuple(dims), 1)}
    found = [one for rank in range(ranks) for one in rows_only(model, rank, ranks)]
    rows, inner = (dims or [1])[0], int(np.prod(dims[1:]))
    tiles = [(one.block.rows, one.block.columns) for one in found]
    assert tiling_fault(rows, inner, tiles) == ""


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_columns_are_of_the_second_dimension(ranks: int) -> None:
    shape = (4, 5, 3)
    found = [one for rank in range(ranks) for one in column_shard("t", shape, "p", rank, ranks)]
    assert faults({"t": shape}, found) == {"t": ""}
    full = np.arange(60).reshape(shape)
    for rank in range(ranks):
        for one in column_shard("t", shape, "p", rank, ranks):
            first, end = share(5, rank, ranks)
            local = np.ascontiguousarray(full[:, first:end]).ravel()
            assert one.end == local.size
            block = full.reshape(4, 15)[:, slice(*one.block.columns)]
            np.testing.assert_array_equal(local, block.ravel())


def test_of_replicas_one_publishes() -> None:
    assert len(whole("t", (3,), "p", replica=0)) == 1
    assert whole("t", (3,), "p", replica=1) == ()
    heads = Heads(query=8, key_value=2, head_dim=1)
    for rank in range(8):
        found = grouped_qkv(("q", "k", "v"), heads, (5,), "p", rank, 8)
        assert [one.tensor for one in found] == (["q", "k", "v"] if rank % 4 == 0 else ["q"])


def test_of_equal_pieces_the_first_rank_has_one() -> None:
    held = [["a", "b"], ["b", "c"], [], ["a", "d", "c"]]
    assert first_holders(held) == [[0, 1], [1], [], [1]]


@pytest.mark.parametrize(
    ("cut_wrongly", "words"),
    [
        (partial(Heads, query=6, key_value=4, head_dim=1), "do not share"),
        (partial(gate_up, "gate", "up", (8, 2), "p", 0, 3), "cannot be divided among 3"),
        (partial(grouped_qkv, ("q", "k", "v"), Heads(3, 3, 1), (4,), "p", 0, 2), "among 2"),
        (partial(column_shard, "t", (8,), "p", 0, 2), "no second dimension"),
        (partial(piece, "t", (8,), "p", (0, 9)), "are not in it"),
        (partial(row_shard, "t", (0, 4), "p", 0, 1), "no weights"),
    ],
)
def test_what_cannot_be_is_said(cut_wrongly: Callable[[], object], words: str) -> None:
    with pytest.raises(ShardError, match=words):
        cut_wrongly()


def test_a_parameter_of_another_size_or_name_is_refused() -> None:
    found = row_shard("t", (8, 4), "p", 0, 2)
    check_fit(found, {"p": LocalBits("bfloat16", np.zeros(16, "<u2"))})
    for parameters, words in (
        ({"p": ("bfloat16", 15)}, r"has 15 weights here, its piece takes 0\.\.16"),
        ({}, "no parameter p"),
        ({"p": ("complex128", 16)}, "not carried"),
    ):
        wrong = {name: LocalBits(d, np.zeros(n, "<u2")) for name, (d, n) in parameters.items()}
        with pytest.raises(ShardError, match=words):
            check_fit(found, wrong)


SHAPE = Shape()


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.lists(st.sampled_from([0.0, 0.02, 0.4, 1.0]), min_size=1, max_size=3),
)
def test_a_chain_of_sharded_versions_arrives_bit_exactly(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, shared: bool, densities: list[float]
) -> None:
    model = dense(SHAPE, 1)
    trainer = ShardedTrainer(tmp_path_factory.mktemp("t"), SHAPE, model, ranks, shared=shared)
    for version, density in enumerate(densities, start=1):
        model = next_model(model, version, density)
        manifest = trainer.publish(version, model)
        assert {t.name: t.digest_after for t in manifest.tensors} == {
            name: hex_digest(digest_of(t.bits)) for name, t in model.items()
        }
        trainer.receive(manifest)
        assert_holds(trainer.receiver, model, version)
    assert trainer.stores[0].versions() == tuple(range(1, len(densities) + 1))


@pytest.fixture
def four(tmp_path: Path) -> ShardedTrainer:
    return ShardedTrainer(tmp_path, SHAPE, dense(SHAPE, 1), 4)


def test_a_base_of_shards_takes_a_joiner_in(four: ShardedTrainer) -> None:
    new = next_model(dense(SHAPE, 1), 5, 0.3)
    four.publish(1, new)
    base = four.publish_base(1)
    assert base.is_base
    joiner = Receiver(dense(SHAPE, 9))
    joiner.commit(joiner.decode(base, four.chunks(base), KEY.verify_key, 0.0))
    assert_holds(joiner, new, 1)
    four.encoders[0]._held[0].bits[:] ^= 1  # A bit flipped in a rank's memory.
    with pytest.raises(ShardError, match="hold other weights than were published"):
        four.publish_base(1)


def test_every_store_but_the_first_is_named_and_holds_what_is_said_of_it(
    four: ShardedTrainer,
) -> None:
    manifest = four.publish(1, next_model(dense(SHAPE, 1), 5, 0.5))
    assert manifest.origins == ("http://rank-1", "http://rank-2", "http://rank-3")
    assert {chunk.origin for chunk in manifest.chunks} == {None, 0, 1, 2}
    assert four.chunks(manifest)
    held = [len(list(store.chunks_dir.iterdir())) for store in four.stores]
    assert sum(held) <= len({chunk.id for chunk in manifest.chunks}) + len(held)


def test_a_rank_that_dies_before_its_report_publishes_nothing_and_the_next_works(
    four: ShardedTrainer,
) -> None:
    model = dense(SHAPE, 1)
    reports = four.reports(1, next_model(model, 5, 0.3))
    with pytest.raises(ShardError, match="no report from rank 2"):
        four.coordinator.publish(1, [r for r in reports if r.rank != 2])
    assert four.stores[0].versions() == ()
    assert [encoder.version for encoder in four.encoders] == [0] * 4
    for version in (1, 2):
        model = next_model(model, 5 + version, 0.3)
        four.receive(four.publish(version, model))
        assert_holds(four.receiver, model, version)


@pytest.fixture
def encoded(tmp_path: Path) -> tuple[ShardedTrainer, list[ShardReport]]:
    model = dense(SHAPE, 1)
    trainer = ShardedTrainer(tmp_path, SHAPE, model, 2)
    return trainer, trainer.reports(1, next_model(model, 5, 0.3))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "rank 1 reports version 2 on 0, wanted is 1 on 0"),
        ({"parent": 7}, "rank 1 reports version 1 on 7, wanted is 1 on 0"),
        ({"rank": 0}, "rank 0 of 2 reported out of turn"),
        ({"rank": 2}, "rank 2 of 2 reported out of turn"),
    ],
)
def test_a_report_for_anything_else_is_a_clear_error(
    encoded: tuple[ShardedTrainer, list[ShardReport]], changes: dict, words: str
) -> None:
    trainer, (first, second) = encoded
    with pytest.raises(ShardError, match=words):
        trainer.coordinator.publish(1, [first, structs.replace(second, **changes)])
    assert trainer.stores[0].versions() == ()


def test_ranks_that_disagree_or_overlap_are_refused(
    encoded: tuple[ShardedTrainer, list[ShardReport]],
) -> None:
    trainer, (first, second) = encoded
    publish = trainer.coordinator.publish
    other = tuple(structs.replace(t, dtype="float16") for t in second.tensors)
    with pytest.raises(ShardError, match=r"is \('bfloat16', .* on rank 0 and \('float16'"):
        publish(1, [first, structs.replace(second, tensors=other)])
    own = {t.name: t for t in second.tensors}
    query = next(t for t in first.tensors if t.name == "q")
    gap = tuple(t for t in second.tensors if t.name != "q")
    overlap = structs.replace(query, chunks=(*query.chunks, *own["q"].chunks))
    for wrong in (gap, (*gap, query), (*gap, overlap)):
        with pytest.raises(ManifestError, match=r"q \(16, 6\): chunks do not tile it"):
            publish(1, [first, structs.replace(second, tensors=wrong)])
    with pytest.raises(ShardError, match=r"began with: .'e4.down"):
        publish(1, [first, structs.replace(second, tensors=())])
    extra = (*first.tensors, structs.replace(first.tensors[0], name="extra"))
    with pytest.raises(ShardError, match=r"began with: .'extra"):
        publish(1, [structs.replace(first, tensors=extra), second])
    with pytest.raises(ShardError, match="does not follow"):
        publish(0, [first, second])
    assert trainer.stores[0].versions() == ()


def test_a_baseline_moves_only_to_what_its_rank_encoded(
    encoded: tuple[ShardedTrainer, list[ShardReport]],
) -> None:
    trainer, reports = encoded
    manifest = trainer.coordinator.publish(1, reports)
    encoder = trainer.encoders[0]
    for wrong in (replace(manifest, version=2), replace(manifest, parent=3)):
        with pytest.raises(ShardError, match="did not encode version"):
            encoder.advance(wrong)
    foreign = tuple(structs.replace(t, chunks=t.chunks[1:]) for t in manifest.tensors)
    with pytest.raises(ShardError, match="leaves out what rank 0 reported"):
        encoder.advance(replace(manifest, tensors=foreign))
    assert encoder.version == 0
    encoder.advance(manifest)
    assert encoder.version == 1
    with pytest.raises(ShardError, match="did not encode version"):
        encoder.advance(manifest)


def test_a_baseline_is_what_was_published_whatever_the_trainer_does_next(tmp_path: Path) -> None:
    """An optimiser that steps on in place must not leak into the baseline."""
    old = {"w": tensor("w", (8, 6), 1)}
    live = old["w"].bits.copy()
    held = {"w": LocalBits("bfloat16", live)}
    encoder = ShardEncoder(ChunkStore(tmp_path), 0, rows_only(old, 0, 1), held)
    coordinator = ShardCoordinator(publisher_of(ChunkStore(tmp_path)), 1)
    digests = coordinator.begin([encoder.parts()])
    live[3] += 1
    published = live.copy()
    report = encoder.encode(1, digests, held)
    live[:] ^= 0x5555
    encoder.advance(coordinator.publish(1, [report]))
    np.testing.assert_array_equal(np.concatenate([p.bits for p in encoder._held]), published)


def test_a_chunk_that_is_gone_before_the_baseline_moved_ends_the_encoder(
    encoded: tuple[ShardedTrainer, list[ShardReport]],
) -> None:
    trainer, reports = encoded
    manifest = trainer.coordinator.publish(1, reports)
    for path in trainer.stores[1].chunks_dir.iterdir():
        path.unlink()
    with pytest.raises(ChunkMissingError):
        trainer.encoders[1].advance(manifest)
    with pytest.raises(ShardError, match="lost its baseline"):
        trainer.encoders[1].encode(2, trainer.coordinator.digests, {})


def test_a_trainer_that_resumed_from_other_weights_is_told(tmp_path: Path) -> None:
    model = dense(SHAPE, 1)
    trainer = ShardedTrainer(tmp_path, SHAPE, model, 2)
    new = next_model(model, 5, 0.3)
    trainer.publish(1, new)

    def resumed(weights_now: dict[str, TensorBits]) -> list[ShardReport]:
        encoders = [
            ShardEncoder(
                trainer.stores[rank],
                rank,
                pieces(SHAPE, rank, 2),
                weights(cut(SHAPE, weights_now, rank, 2)),
                version=1,
            )
            for rank in range(2)
        ]
        return [encoder.parts() for encoder in encoders]

    again = ShardCoordinator(publisher_of(trainer.stores[0]), 2)
    with pytest.raises(ShardError, match="other weights than version 1"):
        again.begin(resumed(model))
    with pytest.raises(ShardError, match="no digests are known"):
        again.publish(2, [])
    again.begin(resumed(new))
    assert again.digests == trainer.coordinator.digests


def test_a_full_disk_on_one_rank_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(SHAPE, 1)
    trainer = ShardedTrainer(tmp_path, SHAPE, model, 2)
    new = next_model(model, 5, 0.3)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(StoreError, match="No space left on device; make room") as caught:
            trainer.publish(1, new)
    assert "\n" not in str(caught.value)
    assert [path for store in trainer.stores for path in store.chunks_dir.iterdir()] == []
    trainer.receive(trainer.publish(1, new))
    assert_holds(trainer.receiver, new, 1)


def test_a_report_survives_its_json_and_garbage_is_refused(
    encoded: tuple[ShardedTrainer, list[ShardReport]],
) -> None:
    for report in encoded[1]:
        assert ShardReport.from_json(report.to_json()) == report
    for raw in (b"", b"{}", b"[]", b'{"rank":-1}', b"\xff", b"[" * 100_000):
        with pytest.raises(ShardError, match="not a rank's report"):
            ShardReport.from_json(raw)


def test_a_rank_holds_its_shard_and_about_two_chunks_a_thread(tmp_path: Path) -> None:
    chunk = 1 << 20
    old = tensor("w", (512, 8192), 1)
    new = stepped(old, 2, 0.02)
    held = {"w": LocalBits("bfloat16", old.bits)}
    one = ShardSettings(chunk_bytes=chunk, threads=1)
    encoder = ShardEncoder(ChunkStore(tmp_path), 0, rows_only({"w": old}, 0, 1), held, 0, one)
    coordinator = ShardCoordinator(publisher_of(ChunkStore(tmp_path)), 1)
    digests = coordinator.begin([encoder.parts()])
    tracemalloc.start()
    try:
        report = encoder.encode(1, digests, {"w": LocalBits("bfloat16", new.bits)})
        manifest = coordinator.publish(1, [report])
        encoder.advance(manifest)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * chunk < old.bits.nbytes / 3


def test_stores_of_ranks_delete_what_nobody_needs_and_nothing_else(four: ShardedTrainer) -> None:
    trainer, model = four, dense(SHAPE, 1)

    def keep(manifest: Manifest) -> None:
        for rank, store in enumerate(trainer.stores[1:], start=1):
            store.put_manifest(manifest, manifest.origins.index(f"http://rank-{rank}"))

    for version in (1, 2, 3):
        model = next_model(model, version, 0.3)
        keep(trainer.publish(version, model))
        if version == 2:
            keep(trainer.publish_base(2))
    assert all(store.collect([], now_s=1.0) > 0 for store in trainer.stores)
    assert {(s.bases(), s.versions()) for s in trainer.stores} == {((2,), (3,))}
    manifests = [trainer.stores[2].get_manifest(2, base=True), trainer.stores[3].get_manifest(3)]
    chunks = trainer.chunks(manifests[0]) | trainer.chunks(manifests[1])
    joiner = Receiver(dense(SHAPE, 9))
    joiner.commit(joiner.decode_chain(manifests, chunks, KEY.verify_key, 0.0))
    assert_holds(joiner, model, 3)
    own = next(c for c in manifests[1].chunks if c.origin == 0)
    (trainer.stores[1].chunks_dir / own.id).unlink()
    with pytest.raises(StoreError, match="1 chunks are not stored"):
        trainer.stores[1].put_manifest(manifests[1], 0)


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_a_rectangle_is_read_row_by_row(offset: int, rows: int, width: int, spare: int) -> None:
    stride = width + spare
    weights = torch.randn(offset + rows * stride).bfloat16()
    bits = bits_of(weights)
    wanted = np.concatenate(
        [bits[offset + r * stride : offset + r * stride + width] for r in range(rows)]
    )
    # A view that begins in the middle of its storage, as a shard of a flat buffer does.
    inside = torch.cat([torch.zeros(3).bfloat16(), weights])[3:]
    for local in (LocalBits("bfloat16", bits), local_weights({"w": inside})["w"]):
        assert (local.dtype, local.elements) == ("bfloat16", weights.numel())
        np.testing.assert_array_equal(local.read(offset, rows, width, stride), wanted)


def test_weights_are_cast_as_they_are_read_and_integers_are_not() -> None:
    state = {"w": torch.randn(4, 6), "t": torch.randn(6, 4).t(), "ids": torch.arange(5)}
    local = local_weights(state, torch.bfloat16)
    assert {name: one.dtype for name, one in local.items()} == {
        "w": "bfloat16",
        "t": "bfloat16",
        "ids": "int64",
    }
    for name in ("w", "t"):
        wanted = bits_of(state[name].bfloat16())
        np.testing.assert_array_equal(local[name].read(0, 4, 6, 6), wanted)
    np.testing.assert_array_equal(local["ids"].read(1, 3, 1, 1), [1, 2, 3])
    with pytest.raises(TensorFormatError, match="complex128"):
        local_weights({"w": torch.zeros(3, dtype=torch.complex128)})["w"].read(0, 3, 1, 1)
