"""KV tensors of the two model runners of vLLM 0.25 from a plan, on FlashAttention."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.utils import set_kv_cache_layout
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

Caches = dict[str, torch.Tensor]


def _group(config: KVCacheConfig) -> Any:
    (group,) = config.kv_cache_groups
    return SimpleNamespace(
        backend=FlashAttentionBackend,
        kv_cache_spec=group.kv_cache_spec,
        kv_cache_group_id=0,
        layer_names=group.layer_names,
    )


@contextmanager
def layout(name: Any) -> Iterator[None]:
    """vLLM's layout within a block: "NHD", tokens before heads, or "HND"."""
    set_kv_cache_layout(name)
    try:
        yield
    finally:
        set_kv_cache_layout(None)


def allocated_by_v1(config: KVCacheConfig, device: torch.device) -> Caches:
    group = _group(config)
    runner: Any = SimpleNamespace(
        device=device,
        kv_cache_config=config,
        runner_only_attn_layers=set(),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        _kv_cache_spec_attn_group_iterator=lambda: iter([group]),
        _has_mixed_attention_kv_layout=lambda _sizes: False,
    )
    raw = GPUModelRunner._allocate_kv_cache_tensors(runner, config)
    return GPUModelRunner._reshape_kv_cache_tensors(runner, raw, [group.kv_cache_spec.block_size])


def allocated_by_v2(config: KVCacheConfig, device: torch.device) -> Caches:
    group = _group(config)
    raw = attn_utils._allocate_kv_cache(config, {}, device)
    sizes = [group.kv_cache_spec.block_size]
    return attn_utils._reshape_kv_cache([group], raw, "auto", sizes, {}, config)
