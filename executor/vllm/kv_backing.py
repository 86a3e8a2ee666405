"""KV cache memory of a vLLM engine: the place of its blocks, and the pages and granules under them.

Layout. Each layer's tensors say where its blocks are: the first dimension is blocks on CPU and
NVIDIA, in one allocation (vLLM 0.32, and 0.25 as `reserved_worker.py` asks for), or one a layer.
The tensors belong to the layers that the configuration names. A worker inside the engine core
(UniProcExecutor) shares them with the scheduler; those of a worker elsewhere cannot be found here.

Groups. Layers of one kind (full attention, a sliding window, states of Mamba or linear attention)
share a block table. All groups take blocks from one pool and overlay each other: block b of one
group has the bytes of block b of another, and one group at a time owns it.

    block after block   | b=0 [ full 0 | full 1 | pad ] | b=1 [ full 0 | full 1 | pad ] | …
                        | b=0 [ state 0 | state 1     ] | b=1 [ state 0 | state 1     ] | …
    layer after layer   | full 0 [ b=0 | b=1 | … ] | full 1 [ b=0 | b=1 | … ] |

So a block's bytes are those of all groups' layers, whoever owns it, and `kv_layout` finds them
without knowing kinds of layers. Layers of several page sizes have strides of their own.

Granules. In an order of layer after layer, a page of 2 MiB holds one layer's part of many blocks,
and a granule is at least these: 32 blocks of 16 tokens, 64 MiB, for an 8B model in bf16. In an
order of block after block, it is one block, 2 MiB. vLLM 0.32 has such layouts to choose from. 0.25
plans one for other models; its model runners take such a plan for any model whose attention backend
puts blocks first.

Pages. Pages that `kv_layout` finds out of reach are not returned; nor is GPU memory that ROSE did
not reserve (`reserved_worker.py` does). The environment says whether a GPU's pages come from the
driver or are lent.
"""

import logging
import multiprocessing
from bisect import bisect_right
from collections.abc import Callable, Iterable
from copy import copy
from itertools import chain
from typing import Any, Final, NamedTuple

from executor.cuda.backing import Reservation, reservation_at
from executor.cuda.kv_memory import device_granule_blocks
from executor.engine_settings import AUTO, CUDA, MADVISE
from executor.errors import ExecutorError, RankError
from executor.kv.backing import (
    Extent,
    HostPages,
    NoPages,
    PageBackend,
    Range,
    granule_blocks,
    use_huge_pages,
)
from executor.kv.rank_pages import RankPages
from executor.kv.shrink_plan import Granules, KvGroup

logger = logging.getLogger("vllm.rose.kv")
FALLBACK_GRANULE_BLOCKS: Final = 16
VIEW_DIMS_025: Final = 5


class Storage(NamedTuple):
    """One memory allocation: `size` bytes at `address` on a kind of device."""

    device: str
    address: int
    size: int


class KvLayout(NamedTuple):
    """Memory allocations of a KV cache, and each layer's place in them."""

    storages: tuple[Storage, ...]
    extents: tuple[Extent, ...]


def kv_bytes(kv_cache_config: Any) -> int:  # noqa: ANN401 -- vLLM's type
    """Return the size of the KV cache in bytes, wherever it lies."""
    tensors = kv_cache_config.kv_cache_tensors
    sizes: list[int] = [tensor.size for tensor in tensors]
    if any(hasattr(tensor, "layers") or tensor.block_stride for tensor in tensors):
        return max(sizes)  # Each names the one allocation that they share.
    return sum(sizes)


def kv_groups(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
) -> tuple[KvGroup, ...]:
    """Return the groups of layers that share a block table; all take blocks from one pool."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return tuple(
        KvGroup(
            spec.block_size, -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
        )
        for spec in specs
    )


def kv_layout(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
) -> KvLayout | None:
    """Return the layout of the KV cache; None if ROSE cannot release its pages block by block.

    That is so if a layer's memory is out of this process's reach, if the allocations hold more than
    the KV cache, or if two blocks share bytes.
    """
    layers = vllm_config.compilation_config.static_forward_context
    groups = kv_cache_config.kv_cache_groups
    caches = [_caches_of(layers.get(name)) for group in groups for name in group.layer_names]
    if not caches or not all(caches) or _has_a_second_pool(kv_cache_config):
        return None
    tensors = [tensor for layer in caches for tensor in layer]
    storages = tuple(dict.fromkeys(map(_storage_of, tensors)))
    if sum(storage.size for storage in storages) != kv_bytes(kv_cache_config):
        return None
    blocks: int = kv_cache_config.num_blocks
    parts = [_parts(tensor, blocks) for tensor in tensors]
    ends = {storage.address + storage.size for storage in storages}
    extents = _merged(set(chain(*parts)), blocks, ends) if all(parts) else ()
    return KvLayout(storages, extents) if extents else None


def _has_a_second_pool(config: Any) -> bool:  # noqa: ANN401 -- vLLM's types
    return any(getattr(tensor, "host_resident", False) for tensor in config.kv_cache_tensors)


def _caches_of(layer: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- vLLM's layer and tensors
    """Return the tensors of a layer's KV or states in this process; () if there are none."""
    cache = getattr(layer, "kv_cache", None)
    tensors = cache if isinstance(cache, tuple | list) else (cache,)
    known = all(hasattr(tensor, "device") and tensor.shape[0] for tensor in tensors)
    return tuple(tensors) if known else ()


def _storage_of(cache: Any) -> Storage:  # noqa: ANN401 -- a tensor
    storage = cache.untyped_storage()
    return Storage(cache.device.type, storage.data_ptr(), storage.nbytes())


def _parts(cache: Any, blocks: int) -> list[Extent]:  # noqa: ANN401 -- a tensor
    """Return the places of all blocks in a layer's tensor, whose first dimension is blocks.

    A kernel may see a block as several of its own. Where heads come before blocks in memory, each
    head has a place. The result is empty if the first dimension is another one.
    """
    kernel_blocks, rest = divmod(cache.shape[0], blocks)
    if rest:
        return []
    size: int = cache.element_size()
    kernel_stride, *strides = (step * size for step in cache.stride())
    stride = kernel_blocks * kernel_stride
    starts, length = [cache.data_ptr()], stride - kernel_stride + size
    for count, step in zip(cache.shape[1:], strides, strict=True):
        if step >= stride and count > 1:
            starts = [start + number * step for start in starts for number in range(count)]
        else:
            length += (count - 1) * step
    return [Extent(start, stride, length) for start in starts]


def _merged(parts: Iterable[Extent], blocks: int, ends: set[int]) -> tuple[Extent, ...]:
    """Return these extents with those that lie among each other's blocks merged.

    Groups of layers overlay each other, block upon block. A merged extent has all bytes up to the
    next block, unless its last block would reach beyond what follows it. `ends`: addresses at which
    allocations end. The result is empty if two blocks share bytes.
    """
    merged: list[Extent] = []
    end = 0
    for part in sorted(parts, key=lambda part: part.base):
        last = merged[-1] if merged and part.base < end else None
        if last is None:
            merged.append(part)
        elif part.stride == last.stride:
            length = max(last.block_bytes, part.base - last.base + part.block_bytes)
            merged[-1] = Extent(last.base, last.stride, length)
        else:
            return ()
        end = merged[-1].base + (blocks - 1) * part.stride + merged[-1].block_bytes
        if merged[-1].block_bytes > part.stride:
            return ()
    limits = sorted({extent.base for extent in merged} | ends)
    return tuple(
        Extent(extent.base, extent.stride, extent.stride)
        if extent.base + blocks * extent.stride <= limits[bisect_right(limits, extent.base)]
        else extent
        for extent in merged
    )


def block_outermost_first(names: Iterable[str]) -> list[str]:
    """Return vLLM 0.32's layout names, block-outermost ones first, else in order of preference."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return sorted(names, key=lambda name: not KVCacheLayout[name].is_block_outermost)


def packed(config: Any) -> Any:  # noqa: ANN401 -- vLLM's KVCacheConfig
    """Return a configuration with all layers in one allocation, block after block, for vLLM 0.25.

    Other versions keep theirs. Raises ExecutorError if blocks cannot be put together.
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

    vLLM 0.25, whose views have five dimensions, makes wrong ones of a packed plan where heads come
    before tokens.
    """
    for cache in caches:
        block = cache[0]
        order = sorted(range(block.dim()), key=block.stride, reverse=True)
        run = block if cache.dim() == VIEW_DIMS_025 else block.permute(order)
        if not run.is_contiguous():
            raise ExecutorError(
                "the KV cache has heads before tokens; set VLLM_KV_CACHE_LAYOUT=NHD"
            )


def kv_pages(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
    backend: str = AUTO,
    common: Callable[[int], int] = int,
) -> tuple[PageBackend, Granules]:
    """Return the page backend under the KV blocks of an engine, and its granules.

    That is the memory of this process, or of workers in child processes that report theirs. common:
    called by a worker's rank with its own blocks of a granule, 0 if its pages cannot be given back;
    returns those of all ranks. Raises ExecutorError if `backend` cannot be used; with AUTO the
    result is a NoPages then.
    """
    blocks: int = kv_cache_config.num_blocks
    layout = kv_layout(vllm_config, kv_cache_config)
    if layout is None and (workers := multiprocessing.active_children()):
        try:
            ranks: int = vllm_config.parallel_config.world_size
            pids = [worker.pid for worker in workers if worker.pid]
            pages = RankPages.of_processes(pids, ranks, blocks)
        except RankError as error:
            logger.warning("%s", error)
        else:
            return pages, pages.granules
    reservation = None if layout is None else _reservation(layout)
    wrong = _lacking(layout, reservation, backend)
    own = 0 if layout is None or wrong is not None else _granule_blocks(layout, reservation)
    of_granule = common(own)
    if wrong is None and not of_granule:
        wrong = "another rank's KV pages cannot be given back"
    if wrong is not None:
        if backend != AUTO:
            raise ExecutorError(f"ROSE_KV_BACKEND is {backend}, but {wrong}")
        logger.warning("%s: no KV pages will be given back", wrong)
        return NoPages(kv_bytes(kv_cache_config)), Granules(blocks, FALLBACK_GRANULE_BLOCKS)
    assert layout is not None
    extents = layout.extents
    granules = Granules(blocks, of_granule)
    if reservation is not None:
        return reservation.backend(extents, granules), granules
    # The scheduler is made before the first request: the memory has no content yet.
    for storage in layout.storages:
        use_huge_pages(Range(storage.address, storage.address + storage.size).whole_pages())
    return HostPages(extents, granules, kv_bytes(kv_cache_config)), granules


def _granule_blocks(layout: KvLayout, reservation: Reservation | None) -> int:
    if reservation is None:
        return granule_blocks(layout.extents)
    return device_granule_blocks(layout.extents, reservation.page_bytes)


def _reservation(layout: KvLayout) -> Reservation | None:
    """Return the Reservation that is the whole KV cache, None if there is none."""
    return reservation_at(layout.storages[0].address) if len(layout.storages) == 1 else None


def _lacking(layout: KvLayout | None, reservation: Reservation | None, backend: str) -> str | None:
    """Return the reason why the pages cannot be given back in that way, None if they can."""
    if layout is None:
        return (
            "the KV cache is out of this process's reach; run the worker in the engine core"
            " (UniProcExecutor), or over several ranks with --worker-cls"
            " executor.vllm.cpu_worker.CpuKvWorker (on a GPU ReservedKvWorker), without layers"
            " whose blocks are on the host or share bytes"
        )
    # Memory that ROSE reserved comes from a GPU's driver, whatever the engine computes on.
    device = layout.storages[0].device if reservation is None else CUDA
    on_host = device == "cpu"
    if backend not in (AUTO, MADVISE if on_host else CUDA):
        return f"the KV cache is on {device}; set ROSE_KV_BACKEND=auto"
    if not on_host and reservation is None:
        return (
            f"the KV cache on {device} is in memory that ROSE did not reserve; start the"
            " engine with --worker-cls executor.vllm.reserved_worker.ReservedKvWorker"
        )
    return None
