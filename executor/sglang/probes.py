"""Probes at an engine's start: SGLang's allocator and KV addresses against what ROSE computes.

Names and signatures say nothing about behaviour (`executor.engine_surfaces`). These probes compare
it, in milliseconds, before the first request: a guest whose probe fails does not start, and a host
lends nothing.
"""

from typing import Any, Final

import torch

from executor.errors import EngineProbeError
from executor.kv.backing import NoPages, PageBackend
from executor.sglang.kv_pool import blocks_of, extent_of, free_blocks, kv_tensors, set_free_blocks

MOST_BLOCKS: Final = 4


def check_allocator(allocator: Any) -> None:  # noqa: ANN401 -- SGLang's
    """Raise EngineProbeError unless an allocator that no request uses hands out the lowest of the
    blocks that ROSE leaves it, and counts them.

    The allocator is as it was afterwards.
    """
    whole = free_blocks(allocator)
    # Freed blocks wait for the next sort.
    sorts, allocator.need_sort = allocator.need_sort, True
    try:
        differs = _differs(allocator, whole)
    except Exception as error:
        raise EngineProbeError(
            f"this SGLang's KV allocator cannot do without blocks: {error!r:.120}"
        ) from error
    finally:
        set_free_blocks(allocator, whole)
        allocator.need_sort = sorts
    if differs:
        raise EngineProbeError(f"this SGLang's KV allocator has other {differs} than ROSE expects")


def _differs(allocator: Any, whole: torch.Tensor) -> str:  # noqa: ANN401 -- SGLang's
    tokens = int(allocator.page_size)
    if not torch.equal(torch.sort(whole).values.cpu(), torch.arange(1, blocks_of(allocator))):
        return "free blocks"
    left = whole[len(whole) // 2 :]
    set_free_blocks(allocator, left)
    if allocator.available_size() != len(left) * tokens:
        return "counts of free blocks"
    blocks = left[:MOST_BLOCKS].tolist()
    slots = allocator.alloc(len(blocks) * tokens)
    if slots.tolist() != [block * tokens + n for block in blocks for n in range(tokens)]:
        return "allocations"
    if allocator.available_size() != (len(left) - len(blocks)) * tokens:
        return "counts after an allocation"
    allocator.free(slots)
    freed = torch.equal(torch.sort(free_blocks(allocator)).values, left)
    return "" if freed and allocator.available_size() == len(left) * tokens else "freed blocks"


def check_addresses(allocator: Any, pages: PageBackend) -> None:  # noqa: ANN401 -- SGLang's
    """Raise EngineProbeError unless layers find their first blocks at the addresses that ROSE
    computes, and each KV tensor is a layer's.

    Does nothing where no KV pages are given back.
    """
    if isinstance(pages, NoPages):
        return
    pool, tokens = allocator.get_kvcache(), int(allocator.page_size)
    extents = {e.base: e for e in (extent_of(t, tokens) for t in kv_tensors(pool))}
    unseen = set(extents)
    for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
        for tensor in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
            base, slot_bytes = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
            extent = extents.get(base)
            if extent is None or slot_bytes * tokens != extent.stride:
                raise EngineProbeError(
                    f"block 1 of layer {layer} is not at the address that ROSE computes"
                )
            unseen.discard(base)
    if unseen:
        raise EngineProbeError("a tensor of the KV cache belongs to no layer")
