"""One rank of a tensor parallel engine without the others: vLLM's own classes, groups mocked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

VOCABULARY = 250
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    # A kernel on CPU wants at least 32 rows on each of eight ranks, or it pads them after loading.
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3Config", {"tie_word_embeddings": False}),
    "llama": ("LlamaConfig", {}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 8, **EXPERTS}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {"num_experts": 8, "shared_expert_intermediate_size": 64, **EXPERTS},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
}


def save_model(name: str, folder: Path) -> None:
    """Write a random bf16 checkpoint of a family; nothing in it is zero, biases neither."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind, extra = MODELS[name]
    config = getattr(transformers, kind)(**SHAPE | extra)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def engine_config(folder: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    # vLLM looks at a model's class in a process of its own, which takes ten seconds for each.
    with mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda run: run()):
        return EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
        ).create_engine_config()


def expert_packer() -> Any:
    """The module that packs experts for CPU kernels by its `cpu_prepack_moe_weight`."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if hasattr(cpu_moe, "cpu_prepack_moe_weight"):
        return cpu_moe
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe  # vLLM 0.25

    return cpu_fused_moe


def group(rank: int, size: int) -> Any:
    device = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return SimpleNamespace(
        rank=rank,
        rank_in_group=rank,
        world_size=size,
        ranks=list(range(size)),
        first_rank=0,
        last_rank=size - 1,
        is_first_rank=True,
        is_last_rank=True,
        device_group=device,
        cpu_group=device,
        device_communicator=None,
        unique_name="mocked",
    )


@contextmanager
def as_rank(config: Any, rank: int, size: int) -> Iterator[None]:
    """Be one of `size` tensor parallel ranks; experts are sharded like everything else."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    alone, tensor = group(0, 1), group(rank, size)
    groups = {"_TP": tensor, "_EP": tensor, "_WORLD": tensor}
    groups |= dict.fromkeys(("_PP", "_DP", "_DCP", "_PCP"), alone)
    with (
        mock.patch.multiple(parallel_state, **groups),
        mock.patch.object(config.parallel_config, "tensor_parallel_size", size),
        set_current_vllm_config(config),
    ):
        yield
