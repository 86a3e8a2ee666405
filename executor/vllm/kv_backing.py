"""KV cache memory of a vLLM engine: the place of its blocks, and the pages and granules under them.

Layout. vLLM 0.32 has one allocation, and its configuration says where layer l of block b begins in
it. 0.25 allocates for each layer, or once with a stride (`reserved_worker.py` asks for that), and a
layer's tensor says where its blocks are: they come first in every layout that 0.25 has on CPU and
NVIDIA. The tensors belong to the attention layers, which the configuration names. A worker inside
the engine core (UniProcExecutor) shares them with the scheduler; those of a worker elsewhere cannot
be found from here.

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
import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Final, NamedTuple

from executor.cuda.backing import Reservation, reservation_at
from executor.cuda.driver import Driver
from executor.cuda.page_pool import PageClient, PagePool, PageSource
from executor.cuda.page_server import PageServer
from executor.engine_settings import AUTO, CUDA, GUEST, HOST, LEND, MADVISE, EngineSettings
from executor.errors import ExecutorError, LoanError, RankError
from executor.kv.backing import (
    Extent,
    HostPages,
    NoPages,
    PageBackend,
    Range,
    granule_blocks,
    of_two_blocks,
    use_huge_pages,
)
from executor.kv.rank_pages import RankPages
from executor.kv.shrink_plan import Granules

logger = logging.getLogger("vllm.rose.kv")
FALLBACK_GRANULE_BLOCKS: Final = 16
# Pages of a GPU in a granule's run of memory if blocks do not fill whole ones.
GRANULE_RUN_PAGES: Final = 4
# A guest that grows leaves this to the engine's own kernels and to the host's.
HEADROOM_BYTES: Final = 256 << 20


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


def blocks_of(
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    tokens: int,
) -> int:
    """Return the most blocks that one request of `tokens` tokens holds, over all KV groups.

    A group of a sliding window or of states holds no more than its kind of layer ever needs.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return sum(
        min(
            -(-tokens // spec.block_size),
            -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes),
        )
        for spec in specs
    )


def kv_layout(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
) -> KvLayout | None:
    """Return the layout of the KV cache; None if ROSE cannot release its pages block by block.

    That is so if memory is out of this process's reach, or blocks overlap or differ in size, as
    with several KV groups or with a draft model beside its target.
    """
    layers = vllm_config.compilation_config.static_forward_context
    if len(kv_cache_config.kv_cache_groups) != 1 or not _one_size(layers, kv_cache_config):
        return None
    parts = [
        _by_configuration(tensor, layers, kv_cache_config)
        if hasattr(tensor, "layers")
        else _by_tensor(tensor, layers, kv_cache_config)
        for tensor in kv_cache_config.kv_cache_tensors
    ]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    storages = dict.fromkeys(storage for part in found for storage in part.storages)
    return KvLayout(tuple(storages), tuple(extent for part in found for extent in part.extents))


def _by_configuration(tensor: Any, layers: Mapping[str, Any], config: Any) -> KvLayout | None:  # noqa: ANN401
    cache = _cache_of(tensor.layers, layers)
    storage = None if cache is None else _storage_of(cache, tensor.size)
    if storage is None:
        return None
    first = storage.address + tensor.offset
    extents = tuple(
        Extent(first + layer * tensor.layer_stride, tensor.block_stride, _page_bytes(config))
        for layer in range(len(tensor.layers))
    )
    return KvLayout((storage,), extents)


def _by_tensor(tensor: Any, layers: Mapping[str, Any], config: Any) -> KvLayout | None:  # noqa: ANN401
    cache = _cache_of(tensor.shared_by, layers)
    storage = None if cache is None else _storage_of(cache)
    if cache is None or storage is None:
        return None
    # A kernel may see a block as several of its own.
    kernel_blocks, rest = divmod(cache.shape[0], config.num_blocks)
    if rest or cache.stride(0) != max(cache.stride()):
        return None
    stride = kernel_blocks * cache.stride(0) * cache.element_size()
    return KvLayout((storage,), (Extent(cache.data_ptr(), stride, _page_bytes(config)),))


def _cache_of(names: list[str], layers: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- a tensor
    """Return the tensor of the first layer that has one in this process, or None."""
    caches = (getattr(layers.get(name), "kv_cache", None) for name in names)
    return next((cache for cache in caches if getattr(cache, "device", None) is not None), None)


def _storage_of(cache: Any, size: int | None = None) -> Storage | None:  # noqa: ANN401 -- a tensor
    """Return the allocation under a tensor; None if that is not of the requested size."""
    storage = cache.untyped_storage()
    if size is not None and storage.nbytes() != size:
        return None
    return Storage(cache.device.type, storage.data_ptr(), storage.nbytes())


def _one_size(layers: Mapping[str, Any], config: Any) -> bool:  # noqa: ANN401 -- vLLM's
    """Return True if a block is equally large in all layers, and no larger than the group's."""
    (group,) = config.kv_cache_groups
    caches = [_cache_of([name], layers) for name in group.layer_names]
    sizes = {cache.numel() * cache.element_size() for cache in caches if cache is not None}
    return len(sizes) <= 1 and all(s <= config.num_blocks * _page_bytes(config) for s in sizes)


def _page_bytes(config: Any) -> int:  # noqa: ANN401 -- vLLM's types
    (group,) = config.kv_cache_groups
    size: int = group.kv_cache_spec.page_size_bytes
    return size


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

    vLLM 0.25 makes wrong views of a packed plan where heads come before tokens.
    """
    if not all(cache[0].is_contiguous() for cache in caches):
        raise ExecutorError("the KV cache has heads before tokens; set VLLM_KV_CACHE_LAYOUT=NHD")


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
    return _device_granule_blocks(layout.extents, reservation.page_bytes)


def _reservation(layout: KvLayout) -> Reservation | None:
    """Return the Reservation that is the whole KV cache, None if there is none."""
    return reservation_at(layout.storages[0].address) if len(layout.storages) == 1 else None


def _lacking(layout: KvLayout | None, reservation: Reservation | None, backend: str) -> str | None:
    """Return the reason why the pages cannot be given back in that way, None if they can."""
    if layout is None:
        return (
            "the KV cache is out of this process's reach; run the worker in the engine core"
            " (UniProcExecutor), or over several ranks with --worker-cls"
            " executor.vllm.cpu_worker.CpuKvWorker (on a GPU ReservedKvWorker), and a model with"
            " one KV group and layers of one page size"
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


def _device_granule_blocks(extents: Sequence[Extent], page_bytes: int) -> int:
    """Return a granule's number of blocks on a GPU.

    Its runs of memory are whole pages, or GRANULE_RUN_PAGES at least.
    """
    runs = of_two_blocks(extents)
    shortest = min(run.size for run in runs)
    several = max(1, -(-GRANULE_RUN_PAGES * page_bytes * 2 // shortest))
    aligned = all(run.start % page_bytes == 0 for run in runs)
    whole = page_bytes // math.gcd(page_bytes, shortest // 2)
    return min(whole, several) if aligned else several


def reserve_kv(settings: EngineSettings, driver: Driver, size: int, ranks: int = 1) -> Reservation:
    """Return a new reservation of `size` bytes for the KV cache of one of an engine's `ranks`.

    A guest may begin with less than all of its pages: it is ballooned from its first step on, and
    the missing ones may still be its host's. Raises DeviceError or LoanError.
    """
    source = page_source(settings, driver, ranks)
    return Reservation(driver, size, source=source, partly=settings.role == GUEST)


def page_source(settings: EngineSettings, driver: Driver, ranks: int = 1) -> PageSource:
    """Return the source of GPU pages: the driver's pool, or with ROSE_PAGE_SOCKET a lent one.

    There a guest gets a PageClient, and a lending host a PageServer, or the pool if it cannot
    listen. A host of several ranks has a socket a GPU, the path with the end of its UUID appended.
    Raises LoanError for a guest without a lender.
    """
    guest = settings.role == GUEST
    page_bytes = driver.granularity
    pool = PagePool(driver, page_bytes, headroom_bytes=HEADROOM_BYTES if guest else 0)
    if not settings.page_socket:
        return pool
    path = Path(settings.page_socket)
    of_gpu = path.with_name(f"{path.name}.{driver.device[-4:].hex()}")
    if ranks > 1 or (guest and of_gpu.exists()):
        path = of_gpu
    if guest:
        return PageClient(driver, page_bytes, path, pool)
    if (settings.role, settings.level) != (HOST, LEND):
        return pool
    try:
        return PageServer(driver, page_bytes, path, pool)
    except LoanError as error:
        logger.warning("%s: KV memory is lent through the driver instead", error)
        return pool
