"""KV cache memory of an SGLang engine: the place of its token slots, and the pages under them.

A block here is what SGLang's allocator calls a page: tokens that are allocated together, one by
default. Block 0 takes the writes of padding, and is never allocated. Each layer has its keys and
its values in a tensor of their own, [slots, heads, head size], slot after slot.

On host memory whole pages are given back by `HostPages`. GPU memory that ROSE did not reserve is
not given back, and nothing is claimed.
"""

import logging
from collections.abc import Sequence
from typing import Any

from executor.engine_settings import AUTO, MADVISE
from executor.errors import ExecutorError
from executor.kv.backing import (
    Extent,
    HostPages,
    NoPages,
    PageBackend,
    Range,
    granule_blocks,
    use_huge_pages,
)
from executor.kv.shrink_plan import Granules

logger = logging.getLogger("rose.kv")

FALLBACK_GRANULE_TOKENS = 256


def kv_pages(allocator: Any, backend: str = AUTO) -> tuple[PageBackend, Granules]:  # noqa: ANN401 -- SGLang's
    """Return the pages under the blocks of an allocator's KV cache, and its granules.

    Raises ExecutorError if `backend` cannot be had; AUTO then does without.
    """
    page_tokens = int(allocator.page_size)
    blocks = int(allocator.size) // page_tokens + 1
    tensors = _tensors(allocator.get_kvcache())
    if (wrong := _lacking(tensors, backend)) is not None:
        if backend != AUTO:
            raise ExecutorError(f"ROSE_KV_BACKEND is {backend}, but {wrong}")
        logger.warning("%s: no KV pages will be given back", wrong)
        granules = Granules(blocks, max(1, FALLBACK_GRANULE_TOKENS // page_tokens))
        return NoPages(sum(map(_bytes, tensors))), granules
    extents = [_extent(tensor, page_tokens) for tensor in tensors]
    # The event loop has not begun: the memory has no content yet.
    for extent in extents:
        end = extent.base + blocks * extent.stride
        use_huge_pages(Range(extent.base, end).whole_pages())
    granules = Granules(blocks, granule_blocks(extents))
    return HostPages(extents, granules, sum(map(_bytes, tensors))), granules


def _tensors(pool: Any) -> list[Any]:  # noqa: ANN401 -- SGLang's pool, torch's tensors
    """Return keys and values of all layers, nothing for a pool of another kind."""
    keys, values = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)
    if not isinstance(keys, list) or not isinstance(values, list):
        latent = getattr(pool, "kv_buffer", None)
        return list(latent) if isinstance(latent, list) else []
    return [*keys, *values]


def _lacking(tensors: Sequence[Any], backend: str) -> str | None:
    """Return the reason why the pages cannot be given back, None if they can."""
    if not tensors:
        return "this model's KV cache is of a kind whose layout ROSE does not know"
    device = tensors[0].device.type
    if device != "cpu":
        return f"the KV cache on {device} is in memory that ROSE did not reserve"
    if backend not in (AUTO, MADVISE):
        return f"the KV cache is on {device}; set ROSE_KV_BACKEND=auto"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "the KV cache does not lie slot after slot"
    return None


def _extent(tensor: Any, page_tokens: int) -> Extent:  # noqa: ANN401 -- torch's tensor
    size = tensor.stride(0) * tensor.element_size() * page_tokens
    return Extent(tensor.data_ptr(), size, size)


def _bytes(tensor: Any) -> int:  # noqa: ANN401 -- torch's tensor
    return int(tensor.numel() * tensor.element_size())
