"""Probes at an engine's start: ROSE's free queue and KV addresses against what the engine does.

Names and signatures say nothing about behaviour (`executor.engine_surfaces`). These probes compare
it, in milliseconds, before the first request: a guest whose probe fails does not start, and a host
lends nothing.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

from executor.errors import EngineProbeError
from executor.kv.backing import NoPages, PageBackend, Range, coalesce
from executor.vllm.kv_backing import kv_layout

MOST_BLOCKS: Final = 8


def replace_queue(pool: Any, queue: Any) -> None:  # noqa: ANN401 -- vLLM's pool
    """Put `queue` in the place of the free queue of a pool that no request uses.

    Raises EngineProbeError, and leaves a pool with its own kind of queue, if the pool behaves
    otherwise with it.
    """
    stock = pool.free_block_queue
    try:
        expected = _behaviour(pool)
        pool.free_block_queue = queue
        seen = _behaviour(pool)
        differs = next((name for name in expected if seen[name] != expected[name]), None)
    except Exception as error:
        _restore(pool, type(stock))
        raise EngineProbeError(
            f"this vLLM's block pool cannot use ROSE's free queue: {error!r:.120}"
        ) from error
    if differs is not None:
        _restore(pool, type(stock))
        raise EngineProbeError(f"this vLLM's block pool has other {differs} with ROSE's free queue")


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
    queue.append(queue.popleft())
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
) -> None:
    """Raise EngineProbeError unless each layer's tensor has block 1 at the address computed for it.

    Does nothing where no KV pages are given back from this process.
    """
    layout = None if isinstance(pages, NoPages) else kv_layout(vllm_config, kv_cache_config)
    if layout is None:
        return
    own, *beside = (
        coalesce(r for e in layout.extents for r in e.ranges(range(block, block + 1)))
        for block in (1, 0, 2)
    )
    layers = vllm_config.compilation_config.static_forward_context
    for name in chain.from_iterable(g.layer_names for g in kv_cache_config.kv_cache_groups):
        cache = getattr(layers.get(name), "kv_cache", None)
        for tensor in cache if isinstance(cache, list | tuple) else (cache,):
            if getattr(tensor, "device", None) is None:
                continue
            places = _places(tensor, kv_cache_config.num_blocks)
            apart = all(_bytes(places) + _bytes(o) == _bytes([*places, *o]) for o in beside)
            if not places or _bytes([*own, *places]) != _bytes(own) or not apart:
                raise EngineProbeError(
                    f"block 1 of {name} is not at the address that ROSE computes"
                )


def _places(cache: Any, blocks: int) -> list[Range]:  # noqa: ANN401 -- a tensor
    """Return the addresses of block 1 in a tensor; none if its first dimension is not blocks."""
    rows, rest = divmod(cache.shape[0], blocks)
    if rest or not rows:
        return []
    size: int = cache.element_size()
    first = cache.data_ptr() + rows * cache.stride()[0] * size
    starts, run = [first], size
    # Dimensions from the innermost in memory: a run grows while one follows the other.
    for step, count in sorted(zip(cache.stride(), (rows, *cache.shape[1:]), strict=True)):
        if step * size == run:
            run *= count
        elif count > 1:
            starts = [start + n * step * size for start in starts for n in range(count)]
    return coalesce(Range(start, start + run) for start in starts)


def _bytes(places: Iterable[Range]) -> int:
    return sum(place.size for place in coalesce(places))
