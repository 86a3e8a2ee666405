"""What backs the KV blocks of an engine in this process, and in granules of which size.

Pages that are out of reach (`kv_layout.py` says when) are not returned; nor is memory of a GPU that
ROSE did not reserve (`reserved_worker.py` does).
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, Final

from executor.cuda.reservation import Reservation, reservation_at
from executor.errors import ExecutorError
from executor.granules import Granules
from executor.host_pages import Extent, HostPages
from executor.pages import NoPages, PageBackend
from executor.resident import Range, coalesce, use_huge_pages
from executor.vllm.kv_layout import KvLayout, kv_bytes, kv_layout
from executor.vllm.settings import AUTO, CUDA, MADVISE

logger = logging.getLogger("vllm.rose.kv")

# The two ends of a run that share a page with a neighbour then cost less than 2%.
GRANULE_RUN_BYTES: Final = 256 << 10
FALLBACK_GRANULE_BLOCKS: Final = 16
# Pages of a GPU in a granule's run of memory where blocks do not fill whole ones.
GRANULE_RUN_PAGES: Final = 4


def kv_pages(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
    backend: str = AUTO,
) -> tuple[PageBackend, Granules]:
    """The pages under the KV blocks of an engine, and its granules.

    Raises ExecutorError where `backend` cannot be had; AUTO then does without.
    """
    blocks: int = kv_cache_config.num_blocks
    layout = kv_layout(vllm_config, kv_cache_config)
    reservation = None if layout is None else _reservation(layout)
    if (wrong := _lacking(layout, reservation, backend)) is not None:
        if backend != AUTO:
            raise ExecutorError(f"ROSE_KV_BACKEND is {backend}, but {wrong}")
        logger.warning("%s: no KV pages will be given back", wrong)
        return NoPages(kv_bytes(kv_cache_config)), Granules(blocks, FALLBACK_GRANULE_BLOCKS)
    assert layout is not None
    extents = layout.extents
    if reservation is not None:
        granules = Granules(blocks, _device_granule_blocks(extents, reservation.page_bytes))
        return reservation.backend(extents, granules), granules
    # The scheduler is made before the first request: nothing of account is in there yet.
    for storage in layout.storages:
        use_huge_pages(Range(storage.address, storage.address + storage.size).whole_pages())
    granules = Granules(blocks, _granule_blocks(extents))
    return HostPages(extents, granules, kv_bytes(kv_cache_config)), granules


def _reservation(layout: KvLayout) -> Reservation | None:
    """The memory that ROSE reserved for all of it."""
    return reservation_at(layout.storages[0].address) if len(layout.storages) == 1 else None


def _lacking(layout: KvLayout | None, reservation: Reservation | None, backend: str) -> str | None:
    """Why the pages cannot be given back in that way, None where they can."""
    if layout is None:
        return (
            "the KV cache is out of this process's reach; run the worker in the engine core"
            " (UniProcExecutor) and a model with one KV group"
        )
    device = layout.storages[0].device
    on_host = device == "cpu"
    if backend not in (AUTO, MADVISE if on_host else CUDA):
        return f"the KV cache is on {device}; set ROSE_KV_BACKEND=auto"
    if not on_host and reservation is None:
        return (
            f"the KV cache on {device} is in memory that ROSE did not reserve; start the"
            " engine with --worker-cls executor.vllm.reserved_worker.ReservedKvWorker"
        )
    return None


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
