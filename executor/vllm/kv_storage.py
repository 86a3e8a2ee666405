"""Where vLLM keeps its KV blocks in this process, and in granules of which size.

vLLM 0.32 has one allocation; layer l of block b begins at offset + l·layer_stride + b·block_stride
(`KVCacheTensor`). Its address comes from the attention layers, which the configuration names: a
worker inside the engine core (UniProcExecutor) shares that object with the scheduler. A worker
elsewhere leaves nothing here to find, and its pages are then not returned; nor are those of models
with several KV groups, whose blocks overlay each other.
"""

import logging
from typing import Any, Final

from executor.granules import Granules
from executor.host_pages import Extent, HostPages
from executor.pages import NoPages, PageBackend
from executor.resident import Range, coalesce, use_huge_pages

logger = logging.getLogger("vllm.rose.kv")

# The two ends of a run that share a page with a neighbour then cost less than 2%.
GRANULE_RUN_BYTES: Final = 256 << 10
FALLBACK_GRANULE_BLOCKS: Final = 16


def kv_pages(vllm_config: Any, kv_cache_config: Any) -> tuple[PageBackend, Granules]:  # noqa: ANN401 -- vLLM's types
    """The pages under the KV blocks of an engine, and its granules."""
    blocks: int = kv_cache_config.num_blocks
    bytes_total = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
    base = _base_address(vllm_config, kv_cache_config, bytes_total)
    if base is None:
        logger.warning("KV pages are out of this process's reach: none will be given back")
        return NoPages(bytes_total), Granules(blocks, FALLBACK_GRANULE_BLOCKS)
    # The scheduler is made before the first request: nothing of account is in there yet.
    use_huge_pages(Range(base, base + bytes_total).whole_pages())
    extents = _extents(kv_cache_config, base)
    granules = Granules(blocks, _granule_blocks(extents))
    return HostPages(extents, granules, bytes_total), granules


def _base_address(vllm_config: Any, kv_cache_config: Any, bytes_total: int) -> int | None:  # noqa: ANN401 -- vLLM's types
    if len(kv_cache_config.kv_cache_groups) != 1:
        return None
    layers = vllm_config.compilation_config.static_forward_context
    for tensor in kv_cache_config.kv_cache_tensors:
        for name in tensor.layers:
            cache: Any = getattr(layers.get(name), "kv_cache", None)
            if getattr(cache, "device", None) is None or cache.device.type != "cpu":
                continue
            storage = cache.untyped_storage()
            if storage.nbytes() == bytes_total:
                address: int = storage.data_ptr()
                return address
    return None


def _extents(kv_cache_config: Any, base: int) -> list[Extent]:  # noqa: ANN401 -- vLLM's types
    (group,) = kv_cache_config.kv_cache_groups
    page_bytes: int = group.kv_cache_spec.page_size_bytes
    return [
        Extent(base + tensor.offset + layer * tensor.layer_stride, tensor.block_stride, page_bytes)
        for tensor in kv_cache_config.kv_cache_tensors
        for layer in range(len(tensor.layers))
    ]


def _granule_blocks(extents: list[Extent]) -> int:
    """Blocks in the smallest granule whose runs of memory have at least GRANULE_RUN_BYTES."""
    two_blocks = coalesce(piece for extent in extents for piece in extent.ranges(range(2)))
    shortest = min((piece.size for piece in two_blocks), default=2)
    return max(1, -(-GRANULE_RUN_BYTES * 2 // shortest))
