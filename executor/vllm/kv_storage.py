"""Where vLLM keeps its KV blocks in this process, and in granules of which size.

vLLM 0.32 has one allocation; layer l of block b begins at offset + l·layer_stride + b·block_stride
(`KVCacheTensor`). Its address comes from the attention layers, which the configuration names: a
worker inside the engine core (UniProcExecutor) shares that object with the scheduler. A worker
elsewhere leaves nothing here to find, and its pages are then not returned; nor are those of models
with several KV groups, whose blocks overlay each other, nor memory of a GPU that ROSE did not
reserve (`reserved_worker.py` does).
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from executor.cuda.reservation import Reservation, reservation_at
from executor.errors import ExecutorError
from executor.granules import Granules
from executor.host_pages import Extent, HostPages
from executor.pages import NoPages, PageBackend
from executor.resident import Range, coalesce, use_huge_pages
from executor.vllm.settings import AUTO, CUDA, MADVISE

logger = logging.getLogger("vllm.rose.kv")

# The two ends of a run that share a page with a neighbour then cost less than 2%.
GRANULE_RUN_BYTES: Final = 256 << 10
FALLBACK_GRANULE_BLOCKS: Final = 16
# Pages of a GPU in a granule's run of memory where blocks do not fill whole ones.
GRANULE_RUN_PAGES: Final = 4


class _Storage(NamedTuple):
    """The KV cache's memory: on which kind of device, and where it begins."""

    device: str
    address: int


def kv_pages(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
    backend: str = AUTO,
) -> tuple[PageBackend, Granules]:
    """The pages under the KV blocks of an engine, and its granules.

    Raises ExecutorError where `backend` cannot be had; AUTO then does without.
    """
    blocks: int = kv_cache_config.num_blocks
    bytes_total = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
    storage = _storage(vllm_config, kv_cache_config, bytes_total)
    reservation = None if storage is None else reservation_at(storage.address)
    if (wrong := _lacking(storage, reservation, backend)) is not None:
        if backend != AUTO:
            raise ExecutorError(f"ROSE_KV_BACKEND is {backend}, but {wrong}")
        logger.warning("%s: no KV pages will be given back", wrong)
        return NoPages(bytes_total), Granules(blocks, FALLBACK_GRANULE_BLOCKS)
    assert storage is not None
    extents = _extents(kv_cache_config, storage.address)
    if reservation is not None:
        granules = Granules(blocks, _device_granule_blocks(extents, reservation.page_bytes))
        return reservation.backend(extents, granules), granules
    # The scheduler is made before the first request: nothing of account is in there yet.
    use_huge_pages(Range(storage.address, storage.address + bytes_total).whole_pages())
    granules = Granules(blocks, _granule_blocks(extents))
    return HostPages(extents, granules, bytes_total), granules


def _lacking(storage: _Storage | None, reservation: Reservation | None, backend: str) -> str | None:
    """Why the pages cannot be given back in that way, None where they can."""
    if storage is None:
        return (
            "the KV cache is out of this process's reach; run the worker in the engine core"
            " (UniProcExecutor) and a model with one KV group"
        )
    on_host = storage.device == "cpu"
    if backend not in (AUTO, MADVISE if on_host else CUDA):
        return f"the KV cache is on {storage.device}; set ROSE_KV_BACKEND=auto"
    if not on_host and reservation is None:
        return (
            f"the KV cache on {storage.device} is in memory that ROSE did not reserve; start the"
            " engine with --worker-cls executor.vllm.reserved_worker.ReservedKvWorker"
        )
    return None


def _storage(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
    bytes_total: int,
) -> _Storage | None:
    if len(kv_cache_config.kv_cache_groups) != 1:
        return None
    layers = vllm_config.compilation_config.static_forward_context
    for tensor in kv_cache_config.kv_cache_tensors:
        for name in tensor.layers:
            cache: Any = getattr(layers.get(name), "kv_cache", None)
            if getattr(cache, "device", None) is None:
                continue
            storage = cache.untyped_storage()
            if storage.nbytes() == bytes_total:
                return _Storage(cache.device.type, storage.data_ptr())
    return None


def _extents(kv_cache_config: Any, base: int) -> list[Extent]:  # noqa: ANN401 -- vLLM's types
    (group,) = kv_cache_config.kv_cache_groups
    page_bytes: int = group.kv_cache_spec.page_size_bytes
    return [
        Extent(base + tensor.offset + layer * tensor.layer_stride, tensor.block_stride, page_bytes)
        for tensor in kv_cache_config.kv_cache_tensors
        for layer in range(len(tensor.layers))
    ]


def _granule_blocks(extents: Sequence[Extent]) -> int:
    """Blocks in the smallest granule whose runs of memory have at least GRANULE_RUN_BYTES."""
    shortest = min((run.size for run in _of_two_blocks(extents)), default=2)
    return max(1, -(-GRANULE_RUN_BYTES * 2 // shortest))


def _device_granule_blocks(extents: Sequence[Extent], page_bytes: int) -> int:
    """Blocks in the smallest granule whose runs of memory are whole pages, or several of them
    where that would make it large."""
    runs = _of_two_blocks(extents)
    shortest = min(run.size for run in runs)
    several = max(1, -(-GRANULE_RUN_PAGES * page_bytes * 2 // shortest))
    aligned = all(run.start % page_bytes == 0 for run in runs)
    whole = page_bytes // math.gcd(page_bytes, shortest // 2)
    return min(whole, several) if aligned else several


def _of_two_blocks(extents: Sequence[Extent]) -> list[Range]:
    """The runs of memory of two neighbouring blocks."""
    return coalesce(piece for extent in extents for piece in extent.ranges(range(2)))
