import contextlib
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.demo.faulty_worker import permuted
from tests.unit.weight_transfer.loader_cases import (
    FakeEngineModel,
    NormTransforming,
    checkpoint,
    everything,
    loaded,
    never,
)
from tests.unit.weight_transfer.loader_cases import proved as prove
from tests.unit.weight_transfer.loader_cases import sparse_step as step_of
from tests.unit.weight_transfer.loader_cases import staged as staged_step
from weight_transfer.apply.loader_map import LoaderMap
from weight_transfer.apply.probe import Audit, judge
from weight_transfer.apply.receiver import Receiver, StagedUpdate
from weight_transfer.apply.reference import Reference, overlay
from weight_transfer.apply.replica_weights import map_drafts
from weight_transfer.apply.staging import OpaqueCopy, place, write, write_back
from weight_transfer.apply.trace_loader import UnmappableError, rectangles, trace_loader
from weight_transfer.errors import LoaderMapError
from weight_transfer.format.tensors import TensorBits, tensor_of


@pytest.fixture
def base() -> dict[str, TensorBits]:
    return checkpoint(0)


@pytest.fixture
def new(base: dict[str, TensorBits]) -> dict[str, TensorBits]:
    return step_of(base, seed=1)


@pytest.fixture
def staged(base: dict[str, TensorBits], new: dict[str, TensorBits], tmp_path: Path) -> StagedUpdate:
    return staged_step(base, new, tmp_path)


def sizes(tensors: dict[str, TensorBits]) -> dict[str, int]:
    return {name: tensor.bits.size for name, tensor in tensors.items()}


def digests_after(base: dict[str, TensorBits], staged: StagedUpdate) -> dict[str, int]:
    return {**Receiver(base).digests} | {each.name: each.digest_after for each in staged.tensors}


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_sharded_padded_tied_and_transposed_weights_are_found_and_proved(
    base: dict[str, TensorBits], rank: int
) -> None:
    proved = prove(loaded(FakeEngineModel(rank), base), base)
    assert not proved.loose
    assert not proved.transformed
    (found,) = proved.rectangles("attn.v_proj.weight")
    assert (found.target, found.source_offset, found.target_offset) == ("qkv.weight", 0, 48)
    (found,) = proved.rectangles("attn.o_proj.weight")
    assert (found.source_offset, found.shape) == (4 * rank, (8, 4))
    assert (found.source_strides, found.target_strides) == ((8, 1), (4, 1))
    (found,) = proved.rectangles("experts.1.down.weight")
    assert (found.target_offset, found.target_strides) == (32, (1, 8))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_scatter_leaves_what_a_dense_load_leaves_and_goes_back(
    base: dict[str, TensorBits], new: dict[str, TensorBits], staged: StagedUpdate, rank: int
) -> None:
    model = loaded(FakeEngineModel(rank), base)
    proved = prove(model, base)
    placed = place(proved, staged)
    assert write(placed) == ()
    assert everything(model) == everything(loaded(FakeEngineModel(rank), new))
    write_back(placed)
    assert everything(model) == everything(loaded(FakeEngineModel(rank), base))


def test_a_weight_that_was_not_the_parents_is_noticed_when_it_is_overwritten(
    base: dict[str, TensorBits], staged: StagedUpdate
) -> None:
    model = loaded(FakeEngineModel(), base)
    proved = prove(model, base)
    placed = place(proved, staged)
    change = next(change for name, change in placed.changes if name == "qkv.weight")
    model.qkv["weight"].view(-1).view(torch.int16)[int(change.indices[0])] ^= 1
    assert write(placed) == ("qkv.weight",)


def test_writes_that_went_elsewhere_are_found_by_the_audit(
    base: dict[str, TensorBits], staged: StagedUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved = prove(loaded(FakeEngineModel(), base), base)
    # An engine that hands out a copy of its memory: what is written to it changes nothing.
    real = LoaderMap.parameter
    monkeypatch.setattr(LoaderMap, "parameter", lambda self, name: real(self, name).clone())
    placed = place(proved, staged)
    assert write(placed) == ()
    parts = Audit(proved).step(1 << 62)
    after = digests_after(base, staged)
    assert "attn.k_proj.weight" in judge(parts, after, sizes(base)).flipped


def test_both_ranks_together_find_any_flipped_weight(base: dict[str, TensorBits]) -> None:
    models = [loaded(FakeEngineModel(rank), base) for rank in range(2)]
    maps = [prove(model, base) for model in models]
    digests = Receiver(base).digests

    def judged(ranks: tuple[int, ...] = (0, 1)) -> tuple[tuple[str, ...], tuple[str, ...]]:
        parts = [part for rank in ranks for part in Audit(maps[rank]).step(1 << 62)]
        found = judge(parts, digests, sizes(base))
        return found.flipped, found.unjudged

    assert judged() == ((), ())
    assert judged((0,))[1] == ("attn.o_proj.weight", "attn.q_proj.weight", "embed.weight")
    at = {"o_proj.weight": "attn.o_proj.weight", "experts.w2": "experts.0.down.weight"}
    # On one rank only, of a KV head that both have: their copies differ.
    at |= {"qkv.weight": "attn.v_proj.weight", "embed.weight": "embed.weight"}
    for parameter, tensor in at.items():
        flat = dict(models[1].named_parameters())[parameter].view(-1).view(torch.int16)
        place = 63 if parameter == "qkv.weight" else 3
        flat[place] ^= 1
        assert judged() == ((tensor,), ())
        flat[place] ^= 1


def test_what_a_loader_transforms_is_copied_from_a_fresh_load(
    base: dict[str, TensorBits], new: dict[str, TensorBits], staged: StagedUpdate
) -> None:
    model = loaded(NormTransforming(), base)
    with torch.device("meta"):
        trace = trace_loader(NormTransforming(), base)
    proved = LoaderMap.prove(model, trace, base, lambda: loaded(NormTransforming(), base))
    assert proved.loose == ("norm.weight",)
    assert list(proved.transformed) == ["norm.weight"]
    read = overlay(base, staged.tensors)
    fresh = NormTransforming()
    fresh.load_weights((name, read(name)) for name in base)
    reference = Reference(torch.zeros(1), {"norm.weight": fresh.norm["weight"]})
    copy = OpaqueCopy(model, proved, reference)
    placed = place(proved, staged)
    assert write(placed) + copy.write() == ()
    assert everything(model) == everything(loaded(NormTransforming(), new))
    write_back(placed)
    copy.write_back()
    assert everything(model) == everything(loaded(NormTransforming(), base))


class NormPacking(FakeEngineModel):
    """Computes with a packed copy of its norm's weight, as kernels of a CPU do."""

    def pack(self) -> Self:
        self.norm.packed = self.norm["weight"] * 2
        self.norm["bias"] = self.norm["weight"] + 1
        del self.norm["weight"]
        return self


def test_a_module_that_packed_its_weight_away_changes_places_with_a_fresh_one(
    base: dict[str, TensorBits], new: dict[str, TensorBits], staged: StagedUpdate
) -> None:
    model, fresh = (loaded(NormPacking(), tensors).pack() for tensors in (base, new))
    with torch.device("meta"):
        trace = trace_loader(NormPacking(), base)
    proved = LoaderMap.prove(model, trace, base, never)
    assert (proved.packed, proved.loose) == (("norm",), ())
    assert "is processed further" in proved.transformed["norm.weight"]
    assert not any(name.startswith("norm") for name in proved.filled)
    norm, old, wanted = model.norm, model.norm.packed, fresh.norm.packed
    copy = OpaqueCopy(model, proved, Reference(torch.zeros(1), {}, {"norm": fresh.norm}))
    for _ in range(2):
        assert copy.write() == ()
        assert model.norm is norm
        assert model.norm.packed is wanted
    for _ in range(2):
        copy.write_back()
        assert model.norm.packed is old


def test_the_overlay_reads_the_new_version_and_leaves_the_old(
    base: dict[str, TensorBits], new: dict[str, TensorBits], staged: StagedUpdate
) -> None:
    read = overlay(base, staged.tensors)
    for name in base:
        assert torch.equal(read(name), tensor_of(new[name]))
    assert Receiver(base).digests == Receiver(checkpoint(0)).digests


@pytest.mark.parametrize(
    ("dtype", "packed", "words"),
    [
        (torch.bfloat16, False, "qkv"),
        (torch.bfloat16, True, "rose_unpacked"),
        (torch.float32, False, "--dtype bfloat16"),
    ],
    ids=["one differing bit", "packed away", "another type"],
)
def test_a_model_that_is_not_the_loaded_checkpoint_fails_the_proof(
    base: dict[str, TensorBits], dtype: torch.dtype, packed: bool, words: str
) -> None:
    model = loaded(FakeEngineModel(dtype=dtype), base)
    if packed:
        model.qkv["weight"].data = torch.empty(0, dtype=dtype)
    else:
        model.qkv["weight"].data.view(torch.int16).view(-1)[9] ^= 1
    with torch.device("meta"):
        trace = trace_loader(FakeEngineModel(dtype=dtype), base)
    with pytest.raises(LoaderMapError, match=words):
        LoaderMap.prove(model, trace, base, lambda: loaded(FakeEngineModel(dtype=dtype), base))


def test_permuted_values_fail_the_audit(base: dict[str, TensorBits], staged: StagedUpdate) -> None:
    parts = []
    for rank in range(2):
        proved = prove(loaded(FakeEngineModel(rank), base), base)
        write(place(proved, permuted(staged)))
        parts += Audit(proved).step(1 << 62)
    assert len(judge(parts, digests_after(base, staged), sizes(base)).flipped) == 1


dims = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@given(st.data(), dims)
def test_any_nested_view_is_followed_both_ways(data: st.DataObject, shape: list[int]) -> None:
    """A rectangle finds exactly the positions of its view, whatever slices and order made it."""
    source = torch.arange(int(np.prod(shape)) + 7)[7:].view(shape)
    for dim, size in enumerate(shape):
        first = data.draw(st.integers(0, size - 1))
        step = data.draw(st.integers(1, 2))
        source = source[(slice(None),) * dim + (slice(first, None, step),)]
    order = data.draw(st.permutations(range(len(shape))))
    source = source.permute(order)
    target = torch.empty(source.shape)
    (rect,) = rectangles(
        ("s", "t"),
        (source.storage_offset(), 0),
        tuple(source.shape),
        source.stride(),
        target.stride(),
    )
    indices = np.arange(7 + int(np.prod(shape)))
    picked, places = rect.locate(indices)
    reached = dict(zip(places.tolist(), indices[picked].tolist(), strict=True))
    assert reached == dict(enumerate(source.reshape(-1).tolist()))
    pieces = [piece.locate(indices)[1] for piece in rect.pieces(2)]
    assert sorted(np.concatenate(pieces).tolist()) == sorted(places.tolist())


def test_overlapping_views_are_no_map_and_broadcasts_are_several() -> None:
    with pytest.raises(UnmappableError, match="overlap"):
        rectangles(("s", "t"), (0, 0), (3, 3), (1, 1), (3, 1))
    found = rectangles(("s", "t"), (0, 0), (2, 3), (0, 1), (3, 1))
    assert [rect.target_offset for rect in found] == [0, 3]


class FakeDrafts:
    """A drafting model that shares its embedding with the model beside it, and its loader."""

    device = torch.device("cpu")

    def __init__(self, kind: type[FakeEngineModel], beside: FakeEngineModel) -> None:
        self.kind = kind
        self.model = kind(beside.rank)
        self.model.embed, self.model.head = beside.embed, beside.head

    def skeleton(self, device: torch.device) -> FakeEngineModel:
        with device:
            return self.kind(self.model.rank)

    def only_copies(self, _: torch.nn.Module) -> None:
        pass

    process = only_copies
    loading = contextlib.nullcontext


def test_drafts_are_written_with_the_model_and_what_both_have_once(
    base: dict[str, TensorBits], new: dict[str, TensorBits], staged: StagedUpdate
) -> None:
    model = loaded(FakeEngineModel(), base)
    drafts = FakeDrafts(FakeEngineModel, model)
    loaded(drafts.model, base)
    proved, names = map_drafts(prove(model, base), drafts, base)
    assert names == tuple(name for name in base if name != "embed.weight")
    assert [each.target for each in proved.rectangles("embed.weight")] == ["embed.weight"]
    assert write(place(proved, staged)) == ()
    assert everything(model) == everything(drafts.model) == everything(loaded(model, new))
    with torch.no_grad():
        drafts.model.norm["weight"][0] += 1
    digests = digests_after(base, staged)
    assert judge(Audit(proved).step(1 << 62), digests, sizes(base)).flipped == ("norm.weight",)


def test_what_a_loader_of_drafts_computes_is_copied_from_a_fresh_load_or_refused(
    base: dict[str, TensorBits],
) -> None:
    model = loaded(FakeEngineModel(), base)
    drafts = FakeDrafts(NormTransforming, model)
    loaded(drafts.model, base)
    proved, names = map_drafts(prove(model, base), drafts, base)
    assert proved.loose == ("drafts.norm.weight",)
    assert "norm.weight" in names
    with torch.no_grad():
        drafts.model.norm["weight"][0] += 1
    with pytest.raises(LoaderMapError, match="another checkpoint than this base"):
        map_drafts(prove(model, base), drafts, base)


def test_drafts_that_keep_weights_elsewhere_are_refused(base: dict[str, TensorBits]) -> None:
    model = loaded(FakeEngineModel(), base)
    drafts = FakeDrafts(FakeEngineModel, model)
    loaded(drafts.model, base)
    drafts.model.norm["scale"] = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    del drafts.model.norm["weight"]
    with pytest.raises(LoaderMapError, match="drafts keep weights of norm elsewhere"):
        map_drafts(prove(model, base), drafts, base)
