"""KV memory of an engine on a GPU: its reservation, the source of its pages, and its granules."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from executor.cuda.backing import Reservation
from executor.cuda.driver import Driver
from executor.cuda.page_pool import PageClient, PagePool, PageSource
from executor.cuda.page_server import PageServer
from executor.engine_settings import GUEST, EngineSettings
from executor.errors import LoanError
from executor.kv.backing import Extent, blocks_of_runs, of_two_blocks

logger = logging.getLogger("vllm.rose.kv")
# Pages of a GPU in a granule's run of memory if blocks do not fill whole ones.
GRANULE_RUN_PAGES: Final = 4
# A guest that grows leaves this to the engine's own kernels and to the host's.
HEADROOM_BYTES: Final = 256 << 20


def device_granule_blocks(extents: Sequence[Extent], page_bytes: int) -> int:
    """Return a granule's number of blocks on a GPU.

    Its runs of memory are whole pages, or GRANULE_RUN_PAGES on average.
    """
    runs = of_two_blocks(extents)
    several = blocks_of_runs(extents, GRANULE_RUN_PAGES * page_bytes)
    aligned = all(run.start % page_bytes == 0 for run in runs)
    whole = math.lcm(*(page_bytes // math.gcd(page_bytes, run.size // 2) for run in runs))
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
    if not settings.lends:
        return pool
    try:
        return PageServer(driver, page_bytes, path, pool)
    except LoanError as error:
        logger.warning("%s: KV memory is lent through the driver instead", error)
        return pool
