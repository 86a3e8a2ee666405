"""A guest whose KV memory could not come back is told of before it starts, from files alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from rose.engines.kept_kv import kept_kv
from rose.engines.spec import Device, EngineKind

WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
NOT_ROSES = "ROSE does not shrink its pools of windows and states"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, ""),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 4096}, ""),
        (WINDOWS, "sliding windows"),
        ({"text_config": WINDOWS}, "sliding windows"),
        ({"layer_types": ["chunked_attention"]}, "sliding windows"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "states"),
        ({"layers_block_type": ["mamba", "attention", "mlp"]}, "states"),
        ({"hybrid_override_pattern": "M*-M"}, "states"),
        ({"mamba_d_state": 16}, "states"),
        ({"layer_types": 5, "text_config": 7}, ""),
        ({"layer_types": [1, None]}, ""),
        ([], ""),
        (None, ""),
    ],
)
def test_kinds_of_layers_are_those_that_the_checkpoint_names(
    config: Any, kind: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert kept_kv(EngineKind.VLLM, Device.CPU, "auto", tmp_path) is None
    kept = kept_kv(EngineKind.SGLANG, Device.CPU, "auto", tmp_path)
    assert kept == (f"{tmp_path.name} has {kind}, and {NOT_ROSES}" if kind else None)


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
def test_windows_that_sglang_has_in_its_one_pool_come_back(
    architecture: str, tmp_path: Path
) -> None:
    config = {"architectures": [architecture], "layer_types": ["sliding_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kept_kv(EngineKind.SGLANG, Device.CPU, "auto", tmp_path) is None


@pytest.mark.parametrize(
    ("engine", "backend", "why"),
    [
        (EngineKind.VLLM, "cuda", None),
        (EngineKind.VLLM, "auto", "kv_backend is auto: it gives no KV memory of a GPU back"),
        (EngineKind.SGLANG, "auto", "kv_backend is auto: it gives no KV memory of a GPU back"),
        (EngineKind.SGLANG, "cuda", None),
    ],
)
def test_memory_of_a_gpu_comes_back_where_it_is_reserved(
    engine: EngineKind, backend: str, why: str | None, tmp_path: Path
) -> None:
    assert kept_kv(engine, Device.CUDA, backend, tmp_path) == why
