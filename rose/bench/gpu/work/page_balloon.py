"""What a KV balloon makes of the driver's calls: half of a cache goes, and comes back zeroed."""

import time
from contextlib import suppress
from typing import Any, Final

from executor.cuda.driver import Driver
from executor.cuda.reservation import Reservation
from executor.errors import DeviceError
from executor.kv.backing import Extent
from executor.kv.shrink_plan import Granules
from rose.bench.gpu.work.timing import spread

RETURNED, KEPT = "returned", "kept"
_SPARE: Final = {RETURNED: 0, KEPT: 1}


def measure(driver: Driver, pages: int, rounds: int) -> dict[str, Any]:
    """Of a cache of so many pages, with its pages returned to the card, then with them kept.

    `free_grew_by_bytes` is what the card's own figure says of the first half that went.
    `one_unmap_for_a_run`: whether one call unmaps two neighbours, which no document promises.
    """
    ways = {way: _balloon(driver, pages, rounds, _SPARE[way] * pages) for way in (RETURNED, KEPT)}
    return {"pages": pages // 2, "one_unmap_for_a_run": unmaps_runs(driver), **ways}


def unmaps_runs(driver: Driver) -> bool:
    """Unmap two neighbours in one call; returns whether both went."""
    size = driver.granularity
    base = driver.reserve(2 * size)
    handles = [driver.create(size) for _ in range(2)]
    for page, handle in enumerate(handles):
        driver.map(base + page * size, size, handle)
    whole = False
    with suppress(DeviceError):
        driver.unmap(base, 2 * size)
        whole = True
    for page in range(2):
        # What is unmapped already is refused, and that is how it shows.
        with suppress(DeviceError):
            driver.unmap(base + page * size, size)
            whole = False
    for handle in handles:
        driver.release(handle)
    driver.unreserve(base, 2 * size)
    return whole


def _balloon(driver: Driver, pages: int, rounds: int, most_spare: int) -> dict[str, Any]:
    reservation = Reservation(driver, pages * driver.granularity, most_spare=most_spare)
    extent = Extent(reservation.address, reservation.page_bytes, reservation.page_bytes)
    backend = reservation.backend([extent], Granules(pages, 1))
    half = range(pages // 2, pages)
    free, grew = driver.free_bytes(), []
    spent: dict[str, list[float]] = {"release_s": [], "restore_s": []}
    for _ in range(rounds):
        began_s = time.perf_counter()
        backend.release(half)
        gone_s = time.perf_counter()
        grew.append(driver.free_bytes() - free)
        again_s = time.perf_counter()
        backend.restore(half)
        spent["restore_s"].append(time.perf_counter() - again_s)
        spent["release_s"].append(gone_s - began_s)
    reservation.close()
    return {
        "free_grew_by_bytes": grew[0],
        **{name: spread(values) for name, values in spent.items()},
    }
