"""Real vLLM model classes at tensor parallel sizes 1 to 8: the traced map against their loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sharded_models import MODELS, as_rank, engine_config, expert_packer, save_model

from weight_transfer.apply.receiver import Receiver, StagedUpdate
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.format.checkpoint import read_model_dir
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import TensorBits, bits_of
from weight_transfer.publish.version_publisher import VersionPublisher

pytestmark = [
    pytest.mark.engine,
    pytest.mark.starts_others,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}


@dataclass
class ShardingCase:
    config: Any
    base: dict[str, TensorBits]
    new: dict[str, TensorBits]
    staged: StagedUpdate


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters as the loader leaves them: on GPUs experts stay so too, on CPU they are packed."""
    from vllm.model_executor.layers import utils

    from weight_transfer.vllm.disable_cpu_packing import plain_linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain_linear)
    monkeypatch.setattr(expert_packer(), "cpu_prepack_moe_weight", lambda weight, _isa: weight)


def sparse_step(old: dict[str, TensorBits]) -> dict[str, TensorBits]:
    rng = np.random.default_rng(1)
    new = {}
    for name, tensor in old.items():
        bits = tensor.bits.copy()
        chosen = rng.random(bits.size) < 0.03
        bits[chosen] ^= rng.integers(1, 60, int(chosen.sum())).astype(bits.dtype)
        new[name] = TensorBits(name, tensor.dtype, tensor.shape, bits)
    return new


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ShardingCase:
    root: Path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, root / "model")
    base = read_model_dir(root / "model")
    new = sparse_step(base)
    store, key = ChunkStore(root / "store"), SigningKey.generate()
    manifest = VersionPublisher(store, job="test", trainer="test", key=key).publish(1, 0, base, new)
    chunks = {chunk.id: store.get(chunk.id) for chunk in manifest.chunks}
    staged = Receiver(base).decode(manifest, chunks, key.verify_key, manifest.created_s)
    return ShardingCase(engine_config(root / "model"), base, new, staged)


def loader(case: ShardingCase) -> Any:
    import torch

    from weight_transfer.vllm.live_model import VllmLoader

    return VllmLoader(case.config, torch.device("cpu"))


def meta_skeleton(case: ShardingCase) -> Any:
    import torch

    return loader(case).skeleton(torch.device("meta"))


def load(case: ShardingCase, tensors: dict[str, TensorBits]) -> Any:
    from weight_transfer.apply.reference import load_fresh, overlay

    return load_fresh(loader(case), tensors, overlay(tensors))


def differing(one: Any, other: Any) -> list[str]:
    theirs = dict(other.named_parameters())
    return [
        name
        for name, parameter in one.named_parameters()
        if not np.array_equal(bits_of(parameter), bits_of(theirs[name]))
    ]


def never() -> Any:
    raise AssertionError("all of these models' weights have a map")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_rank_becomes_what_a_dense_load_of_the_new_weights_makes_it(
    case: ShardingCase, size: int
) -> None:

    from weight_transfer.apply.loader_map import LoaderMap
    from weight_transfer.apply.probe import Audit, judge
    from weight_transfer.apply.staging import place, write
    from weight_transfer.apply.trace_loader import trace_loader

    after = Receiver(case.new).digests
    elements = {name: tensor.bits.size for name, tensor in case.base.items()}
    parts = []
    for rank in range(size):
        with as_rank(case.config, rank, size):
            live = load(case, case.base)
            trace = trace_loader(meta_skeleton(case), case.base)
            loader_map = LoaderMap.prove(live, trace, case.base, never)
            assert not loader_map.transformed
            assert write(place(loader_map, case.staged)) == ()
            fresh = load(case, case.new)
            assert differing(live, fresh) == []
            assert differing(load(case, case.base), fresh), "the update changed something here"
        parts += Audit(loader_map).step(1 << 62)
    found = judge(parts, after, elements)
    assert (found.flipped, found.unjudged) == ((), ())
    assert {part.tensor for part in parts} == set(case.base), "every tensor lives somewhere"


def launched_by_torch(piece: Any, packed: Any, counts: Any, *, back: bool) -> None:
    """Stand in for a device's kernels, which the interpreter's tests compare with numpy."""
    places, old, new = piece.views(packed)
    old, new = (new, old) if back else (old, new)
    live = piece.target.flat
    counts[piece.row, 0] += (live[places.long()] != old).sum()
    live[places.long()] = new
    counts[piece.row, 1] += (live[places.long()] != new).sum()


@pytest.mark.parametrize("resident_bytes", [0, 1 << 30])
def test_what_a_device_is_given_makes_the_same_of_every_rank(
    case: ShardingCase, resident_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:

    from weight_transfer.apply import loader_map as maps
    from weight_transfer.apply.staging import place, write, write_back
    from weight_transfer.apply.trace_loader import flat_view, trace_loader
    from weight_transfer.format.tensors import DeviceBits
    from weight_transfer.kernels import device as exchange

    monkeypatch.setattr(maps, "live_bits", lambda tensor: DeviceBits(flat_view(tensor)))
    monkeypatch.setattr(exchange, "launch", launched_by_torch)
    for rank in range(4):
        with as_rank(case.config, rank, 4):
            live = load(case, case.base)
            trace = trace_loader(meta_skeleton(case), case.base)
            loader_map = maps.LoaderMap.prove(live, trace, case.base, never)
            placed = place(loader_map, case.staged, resident_bytes)
            ((_, staged),) = placed.groups
            assert bool(staged.resident) != bool(staged.streamed)
            assert write(placed) == ()
            assert differing(live, load(case, case.new)) == []
            write_back(placed)
            assert differing(live, load(case, case.base)) == []


def test_these_models_do_shard_replicate_and_pad(case: ShardingCase) -> None:
    with as_rank(case.config, 7, 8):
        model = load(case, case.base)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layer = "model.layers.0.self_attn"
    assert shapes[f"{layer}.qkv_proj.weight"] == (8 + 8 + 8, 64), "two KV heads on eight ranks"
    assert shapes[f"{layer}.o_proj.weight"] == (64, 8)
    assert shapes["model.embed_tokens.weight"] == (32, 64)
    stacks = [shape for name, shape in shapes.items() if name.endswith("w13_weight")]
    # 32 of 256 rows of gate, and of up.
    assert stacks == [(8, 64, 64)] * (2 if "experts" in " ".join(case.base) else 0)


@pytest.mark.parametrize("case", ["qwen3-moe"], indirect=True)
def test_experts_that_an_engine_packs_are_copied_from_its_own_load(
    case: ShardingCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm import _custom_ops

    from weight_transfer.apply.loader_map import LoaderMap
    from weight_transfer.apply.reference import Reference, load_fresh, overlay
    from weight_transfer.apply.staging import OpaqueCopy, place, write, write_back
    from weight_transfer.apply.trace_loader import trace_loader

    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("this vLLM packs no experts on this processor")
    packed = _custom_ops.cpu_prepack_moe_weight
    monkeypatch.setattr(expert_packer(), "cpu_prepack_moe_weight", packed)
    with as_rank(case.config, 1, 2):
        live = load(case, case.base)
        trace = trace_loader(meta_skeleton(case), case.base)
        loader_map = LoaderMap.prove(live, trace, case.base, lambda: load(case, case.base))
        assert len(loader_map.loose) == 4, "two stacks of experts in each of two layers"
        assert all("experts" in name for name in loader_map.transformed)
        read = overlay(case.base, case.staged.tensors)
        fresh = load_fresh(loader(case), case.base, read)
        known = dict(fresh.named_parameters())
        loose = {name: known[name] for name in loader_map.loose}
        copy = OpaqueCopy(live, loader_map, Reference(torch.zeros(1), loose))
        placed = place(loader_map, case.staged)
        assert write(placed) + copy.write() == ()
        assert differing(live, load(case, case.new)) == []
        write_back(placed)
        copy.write_back()
        assert differing(live, load(case, case.base)) == []
