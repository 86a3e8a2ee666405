import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from weight_transfer.errors import LoaderMapError
from weight_transfer.publisher import Publisher
from weight_transfer.receiver import Receiver, StagedUpdate
from weight_transfer.signing import SigningKey
from weight_transfer.store import ChunkStore
from weight_transfer.tensors import TensorBits, bits_of, tensor_bits, tensor_of
from weight_transfer.vllm import faults
from weight_transfer.vllm.applier import apply_update, live_digests, revert_update
from weight_transfer.vllm.loader_map import LoaderMap
from weight_transfer.vllm.probe import compare, probe_prompt
from weight_transfer.vllm.unpacked import plain_linear, register


class FakeAttention(nn.Module):
    def __init__(self, parts: dict[str, TensorBits]) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(8, 12, dtype=torch.bfloat16)
        for name in ("weight", "bias"):
            fused = torch.cat([tensor_of(parts[f"attn.{p}_proj.{name}"]) for p in "qkv"])
            getattr(self.qkv_proj, name).data = fused


class FakeEngineModel(nn.Module):
    """Fused, padded and tied as vLLM lays out a model at tensor parallel size 1."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, base: dict[str, TensorBits]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, dtype=torch.bfloat16)
        self.embed.weight.data[:10] = tensor_of(base["embed.weight"])
        self.attn = FakeAttention(base)
        self.head = nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def checkpoint(seed: int) -> dict[str, TensorBits]:
    torch.manual_seed(seed)
    shapes = {"embed.weight": (10, 8)}
    for part, rows in (("q", 8), ("k", 2), ("v", 2)):
        shapes |= {f"attn.{part}_proj.weight": (rows, 8), f"attn.{part}_proj.bias": (rows,)}
    return {name: tensor_bits(name, torch.randn(s).bfloat16()) for name, s in shapes.items()}


@pytest.fixture
def base() -> dict[str, TensorBits]:
    return checkpoint(0)


def test_fused_padded_and_tied_parameters_are_found_and_proved(base: dict[str, TensorBits]) -> None:
    model = FakeEngineModel(base)
    loader_map = LoaderMap.prove(model, base)
    found = loader_map.destination("attn.v_proj.weight")
    assert (found.parameter, found.offset, found.elements) == ("attn.qkv_proj.weight", 80, 16)
    assert loader_map.destination("attn.k_proj.bias").offset == 8
    for name, tensor in base.items():
        np.testing.assert_array_equal(bits_of(loader_map.view(name)), tensor.bits)


def test_one_differing_bit_fails_the_proof(base: dict[str, TensorBits]) -> None:
    model = FakeEngineModel(base)
    model.attn.qkv_proj.bias.data.view(torch.int16)[9] ^= 1
    with pytest.raises(LoaderMapError, match="k_proj"):
        LoaderMap.prove(model, base)


def test_packed_away_weights_say_what_to_do(base: dict[str, TensorBits]) -> None:
    model = FakeEngineModel(base)
    model.attn.qkv_proj.weight.data = torch.empty(0, dtype=torch.bfloat16)
    with pytest.raises(LoaderMapError, match="rose_unpacked"):
        LoaderMap.prove(model, base)


def test_misfits_are_named(base: dict[str, TensorBits]) -> None:
    with pytest.raises(LoaderMapError, match="no parameter"):
        LoaderMap.prove(FakeEngineModel(base), base | {"extra": base["embed.weight"]})
    uncovered = {k: v for k, v in base.items() if k != "attn.v_proj.bias"}
    with pytest.raises(LoaderMapError, match="to its end"):
        LoaderMap.prove(FakeEngineModel(base), uncovered)
    with pytest.raises(LoaderMapError, match="float32"):
        LoaderMap.prove(FakeEngineModel(base).float(), base)
    wide = tensor_bits("embed.weight", torch.zeros(10, 9).bfloat16())
    with pytest.raises(LoaderMapError, match="by rows"):
        LoaderMap.prove(FakeEngineModel(base), base | {"embed.weight": wide})


@pytest.fixture
def staged(base: dict[str, TensorBits], tmp_path: Path) -> StagedUpdate:
    store, key = ChunkStore(tmp_path), SigningKey.generate()
    manifest = Publisher(store, "job", "trainer", key, clock=lambda: 0.0).publish(
        1, 0, base, checkpoint(1)
    )
    chunks = {chunk.id: store.get(chunk.id) for chunk in manifest.chunks}
    return Receiver(base).stage(manifest, chunks, key.verify_key, 0.0)


def test_the_scatter_writes_exactly_the_new_weights_and_back(
    base: dict[str, TensorBits], staged: StagedUpdate
) -> None:
    loader_map = LoaderMap.prove(FakeEngineModel(base), base)
    new = checkpoint(1)
    for _ in range(2):
        apply_update(loader_map, staged)
        for name, tensor in new.items():
            np.testing.assert_array_equal(bits_of(loader_map.view(name)), tensor.bits)
    after = {tensor.name: tensor.digest_after for tensor in staged.tensors}
    assert live_digests(loader_map, after) == after
    revert_update(loader_map, staged)
    for name, tensor in base.items():
        np.testing.assert_array_equal(bits_of(loader_map.view(name)), tensor.bits)


def test_permuted_values_fail_the_live_digest(
    base: dict[str, TensorBits], staged: StagedUpdate
) -> None:
    loader_map = LoaderMap.prove(FakeEngineModel(base), base)
    apply_update(loader_map, faults.permuted(staged))
    after = {tensor.name: tensor.digest_after for tensor in staged.tensors}
    wrong = [
        name for name, digest in live_digests(loader_map, after).items() if digest != after[name]
    ]
    assert len(wrong) == 1


def test_faults_are_off_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, fault in (
        ("", faults.Fault.NONE),
        ("wrong_chunk", faults.Fault.WRONG_CHUNK),
        ("stale_weights", faults.Fault.STALE_WEIGHTS),
        ("fault_of_another_part", faults.Fault.NONE),
    ):
        monkeypatch.setenv("ROSE_FAULT", value)
        assert faults.injected() is fault


def test_the_plugin_is_inert_in_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm.model_executor.layers", None)
    for role in ("host", None):
        monkeypatch.delenv("ROSE_ROLE", raising=False)
        if role:
            monkeypatch.setenv("ROSE_ROLE", role)
        register()
    assert os.environ.get("ROSE_ROLE") is None


def test_plain_linear_computes_with_the_live_weight() -> None:
    layer = nn.Linear(4, 3, bias=False)
    plain_linear(layer, remove_weight=True)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        assert layer.cpu_linear(torch.ones(1, 4), layer.weight, None).tolist() == [[8.0] * 3]


def test_logits_are_compared_by_bits() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    assert compare(logits, logits.clone()).ok
    signed = compare(logits, torch.tensor([[-0.0, 1.0]]))
    assert (signed.ok, signed.max_abs_diff) == (False, 0.0)
    assert compare(logits, torch.tensor([[0.0, 1.5]])).max_abs_diff == 0.5
    assert compare(logits, torch.tensor([[0.0, float("nan")]])).max_abs_diff > 1e300


def test_the_probe_prompt_stays_inside_the_vocabulary() -> None:
    for size in (5, 96, 150_000):
        assert all(0 <= token < size for token in probe_prompt(size))
    assert len(set(probe_prompt(96))) == 24
