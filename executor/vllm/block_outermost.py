"""KV memory in which all layers of a block are neighbours, so that a granule can be small.

Layer after layer, a page of 2 MiB holds one layer's part of many blocks, and a granule is at least
these: 32 blocks of 16 tokens, 64 MiB, for an 8B model in bf16. Block after block, it is one block,
2 MiB. vLLM 0.32 has such layouts to choose from. 0.25 plans one for other models; its model runners
take such a plan for any model whose attention backend puts blocks first.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any

from executor.errors import ExecutorError


def block_outermost_first(names: Iterable[str]) -> list[str]:
    """vLLM 0.32's layouts, block-outermost ones first, else in the order of their preference."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return sorted(names, key=lambda name: not KVCacheLayout[name].is_block_outermost)


def packed(config: Any) -> Any:  # noqa: ANN401 -- vLLM's KVCacheConfig
    """On 0.25, a configuration of the same blocks in one allocation, block after block; elsewhere
    as it is.

    Raises ExecutorError where blocks cannot be put together.
    """
    tensors = config.kv_cache_tensors
    if any(hasattr(tensor, "layers") for tensor in tensors):
        return config
    pages = {tensor.size // config.num_blocks for tensor in tensors}
    if len(config.kv_cache_groups) != 1 or len(pages) != 1:
        raise ExecutorError(
            "ReservedKvWorker is for models with one KV group and layers of one size; start without"
        )
    if any(tensor.block_stride for tensor in tensors):
        return config
    (page_bytes,) = pages
    result = copy(config)
    result.kv_cache_tensors = []
    for number, tensor in enumerate(tensors):
        placed = copy(tensor)
        placed.size = tensor.size * len(tensors)
        placed.offset = number * page_bytes
        placed.block_stride = page_bytes * len(tensors)
        result.kv_cache_tensors.append(placed)
    return result


def check_views(caches: Iterable[Any]) -> None:
    """Raise ExecutorError unless each layer's tensor has a block's content in one run.

    0.25 makes wrong views of a packed plan where heads come before tokens.
    """
    if not all(cache[0].is_contiguous() for cache in caches):
        raise ExecutorError("the KV cache has heads before tokens; set VLLM_KV_CACHE_LAYOUT=NHD")
