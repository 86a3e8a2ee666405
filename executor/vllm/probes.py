"""Probes at an engine's start: ROSE's free queue and KV addresses against what the engine does.

Names and signatures say nothing about behaviour (`executor.engine_surfaces`). These probes compare
it, in milliseconds, before the first request: a guest whose probe fails does not start, and a host
lends nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Final

import torch

from executor.errors import ExecutorError
from executor.kv.backing import Extent, NoPages, PageBackend, Range, coalesce
from executor.kv.shrink_plan import Granules
from executor.vllm.kv_backing import kv_layout

MOST_BLOCKS: Final = 8


class ProbeError(ExecutorError):
    """Error: the engine behaves otherwise than ROSE's adapter expects."""


def replace_queue(pool: Any, queue: Any) -> None:  # noqa: ANN401 -- vLLM's pool
    """Put `queue` in the place of the free queue of a pool that no request uses.

    Raises ProbeError, and leaves a pool with its own kind of queue, if the pool behaves otherwise
    with it.
    """
    stock = pool.free_block_queue
    try:
        expected = _behaviour(pool)
        pool.free_block_queue = queue
        seen = _behaviour(pool)
        differs = next((name for name in expected if seen[name] != expected[name]), None)
    except Exception as error:
        _restore(pool, type(stock))
        raise ProbeError(
            f"this vLLM's block pool cannot use ROSE's free queue: {error!r:.120}"
        ) from error
    if differs is not None:
        _restore(pool, type(stock))
        raise ProbeError(f"this vLLM's block pool has other {differs} with ROSE's free queue")


def _behaviour(pool: Any) -> dict[str, object]:  # noqa: ANN401 -- vLLM's pool
    """Return results of a series of the pool's own calls, which leaves all blocks as free."""
    queue = pool.free_block_queue
    free = _numbers(queue.get_all_free_blocks())
    count = min(MOST_BLOCKS, pool.get_num_free_blocks())
    taken = pool.get_new_blocks(count)
    result: dict[str, object] = {
        "free blocks": free,
        "allocations": (len(_numbers(taken)), _numbers(taken) <= free, _used(taken)),
        "counts of free blocks": pool.get_num_free_blocks(),
    }
    pool.free_blocks(taken[:2])
    pool.touch(taken[:1])
    result["blocks after a touch"] = (pool.get_num_free_blocks(), _used(taken))
    pool.free_blocks([taken[0], *taken[2:]])
    block = queue.popleft()
    queue.append(block)
    queue.remove(block)
    queue.prepend_n([block])  # It has no cached content.
    return result | {
        "blocks after all are freed": (_numbers(queue.get_all_free_blocks()), _used(taken)),
        "counts after all are freed": (pool.get_num_free_blocks(), queue.num_free_blocks),
    }


def _numbers(blocks: Iterable[Any]) -> set[int]:
    return {block.block_id for block in blocks}


def _used(blocks: Iterable[Any]) -> list[int]:
    return [block.ref_cnt for block in blocks]


def _restore(pool: Any, stock: type) -> None:  # noqa: ANN401 -- vLLM's pool
    free = [block for block in pool.blocks if not block.is_null]
    for block in free:
        block.ref_cnt = 0
    pool.free_block_queue = stock(free)


def check_addresses(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
    pages: PageBackend,
    granules: Granules,
) -> None:
    """Raise ProbeError unless each layer has a block's bytes at the addresses computed for it.

    The bytes of block 1, or of the first one that has memory with both of its neighbours, are
    inverted through the layers' tensors, compared by address, and restored. Does nothing where no
    KV pages are given back from this process.
    """
    layout = None if isinstance(pages, NoPages) else kv_layout(vllm_config, kv_cache_config)
    blocks: int = kv_cache_config.num_blocks
    mapped = (b for b in range(1, blocks - 1) if _mapped(range(b - 1, b + 2), pages, granules))
    block = next(mapped, None)
    if layout is None or block is None:
        return
    layers = vllm_config.compilation_config.static_forward_context
    for group in kv_cache_config.kv_cache_groups:
        caches = [getattr(layers.get(name), "kv_cache", None) for name in group.layer_names]
        each = chain.from_iterable(c if isinstance(c, list | tuple) else (c,) for c in caches)
        # Layers may share a tensor.
        tensors = {t.data_ptr(): t for t in each if isinstance(t, torch.Tensor)}
        if not _lies_in(layout.extents, list(tensors.values()), blocks, block):
            raise ProbeError(
                f"block {block} of {group.layer_names[0]} is not at the address that ROSE computes"
            )


def _mapped(blocks: range, pages: PageBackend, granules: Granules) -> bool:
    return all(granules.of(block) not in pages.released for block in blocks)


def _lies_in(
    extents: Iterable[Extent], tensors: Sequence[torch.Tensor], blocks: int, block: int
) -> bool:
    """Return True if a block of these tensors has bytes of its own place in `extents` alone."""
    if any(tensor.shape[0] % blocks for tensor in tensors):
        return False
    counts = [tensor.shape[0] // blocks for tensor in tensors]
    written = [
        tensor.narrow(0, count * block, count).view(torch.uint8)
        for tensor, count in zip(tensors, counts, strict=True)
    ]
    memory = _by_address(tensors)
    own, beside = (
        [memory(r) for r in coalesce(r for e in extents for n in numbers for r in e.ranges(n))]
        for numbers in (
            [range(block, block + 1)],
            [range(block - 1, block), range(block + 1, block + 2)],
        )
    )
    before = [part.clone() for part in (*own, *beside)]
    for part in written:
        part.bitwise_not_()
    changed = [int((now != was).sum()) for now, was in zip((*own, *beside), before, strict=True)]
    for part in written:
        part.bitwise_not_()
    whole = sum(changed[: len(own)]) == sum(part.numel() for part in written)
    return whole and not any(changed[len(own) :])


def _by_address(tensors: Iterable[torch.Tensor]) -> Callable[[Range], torch.Tensor]:
    """Return a function that returns the bytes at a range of addresses in the tensors' memory."""
    storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in tensors)}
    whole = {
        start: torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for start, storage in storages.items()
    }

    nothing = torch.empty(0, dtype=torch.uint8)

    def read(place: Range) -> torch.Tensor:
        start = max((start for start in whole if start <= place.start), default=0)
        return whole.get(start, nothing)[place.start - start : place.end - start]

    return read
