"""Where the pages of an engine's KV cache on a GPU come from, by what its environment says."""

import logging
from pathlib import Path
from typing import Final

from executor.cuda.borrower import PageBorrower
from executor.cuda.driver import Driver
from executor.cuda.lender import PageLender
from executor.cuda.page_pool import PagePool, PageSource
from executor.cuda.reservation import Reservation
from executor.errors import LoanError
from executor.vllm.settings import GUEST, HOST, LEND, EngineSettings

logger = logging.getLogger("vllm.rose.kv")

# A guest that grows leaves this to the engine's own kernels and to the host's.
HEADROOM_BYTES: Final = 256 << 20


def reserve_kv(settings: EngineSettings, driver: Driver, size: int) -> Reservation:
    """Reserve an engine's KV cache of `size` bytes.

    A guest may begin with less than all of its pages: it is ballooned from its first step on, and
    what is missing may still be its host's. Raises DeviceError or LoanError.
    """
    source = page_source(settings, driver)
    return Reservation(driver, size, source=source, partly=settings.role == GUEST)


def page_source(settings: EngineSettings, driver: Driver) -> PageSource:
    """The driver; with ROSE_PAGE_SOCKET in between whoever lends or borrows there.

    Raises LoanError for a guest to whom nobody lends. A host serves on without.
    """
    guest = settings.role == GUEST
    page_bytes = driver.granularity
    pool = PagePool(driver, page_bytes, headroom_bytes=HEADROOM_BYTES if guest else 0)
    if not settings.page_socket:
        return pool
    path = Path(settings.page_socket)
    if guest:
        return PageBorrower(driver, page_bytes, path, pool)
    if (settings.role, settings.level) != (HOST, LEND):
        return pool
    try:
        return PageLender(driver, page_bytes, path, pool)
    except LoanError as error:
        logger.warning("%s: KV memory is lent through the driver instead", error)
        return pool
