"""KV memory that a guest of a model could not give back, known from files before it starts.

Such a guest computes under its gate as any other; its memory comes back with a later rung of the
reclaim ladder, at the latest when it ends.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from rose.engines.spec import Capability, Device, EngineKind, lacking

# Architectures whose windows SGLang keeps in its one pool, for as long as the other layers.
_ONE_POOL: Final = {"Gemma3ForCausalLM", "Olmo3ForCausalLM"}
_WINDOWS: Final = {"sliding_attention", "chunked_attention"}
_STATES: Final = {"mamba", "linear_attention", "conv", "hybrid"}
_STATE_SIZES: Final = ("mamba_d_state", "ssm_state_size", "mamba_d_ssm", "hybrid_override_pattern")


@lru_cache
def kept_kv(engine: EngineKind, device: Device, kv_backend: str, model_dir: Path) -> str | None:
    """Return the reason why a guest's KV memory stays until it ends; None if it can give it back.

    model_dir: folder of its checkpoint; one that cannot be read counts as a model of full
    attention, since `check_model` refuses it.
    """
    gpu = device is Device.CUDA
    memory = Capability.RETURN_GPU if gpu else Capability.RETURN_HOST_MEMORY
    if (why := lacking(engine, memory)) is not None:
        return why
    if gpu and kv_backend != "cuda":
        return f"kv_backend is {kv_backend}: it gives no KV memory of a GPU back"
    for kind in _kinds(model_dir, _ONE_POOL if engine is EngineKind.SGLANG else ()):
        if (why := lacking(engine, Capability.RETURN_GROUPS)) is not None:
            return f"{model_dir.name} has {kind}, and {why}"
    return None


def _kinds(model_dir: Path, one_pool: Collection[str]) -> Iterator[str]:
    """Yield the kinds of layers beside full attention that a model's config.json names.

    one_pool: architectures whose sliding windows are like full attention.
    """
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    if not isinstance(text, dict):
        return
    layers = _layers(text)
    if layers & _WINDOWS and not any(config.get("architectures") == [name] for name in one_pool):
        yield "sliding windows"
    if layers & _STATES or any(text.get(name) for name in _STATE_SIZES):
        yield "states"


def _layers(text: Mapping[str, Any]) -> set[str]:
    named = [text.get(name) for name in ("layer_types", "layers_block_type")]
    return {
        kind for each in named if isinstance(each, list) for kind in each if isinstance(kind, str)
    }
