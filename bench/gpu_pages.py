"""What KV pages cost on this GPU: each driver call by the page, and what the balloon makes of them.

    PYTHONPATH=. python bench/gpu_pages.py [--pages N]

Prints one JSON object. All times are microseconds: of a page for the calls, of the whole for
`release` and `restore` of half of a KV cache of N pages. Needs a CUDA device, cuda-bindings and
numpy; without one it says so and exits with 2.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from executor.cuda.bindings import CudaDriver, open_driver
from executor.cuda.reservation import Reservation
from executor.errors import DeviceError
from executor.granules import Granules
from executor.host_pages import Extent


def timed_us(work: Callable[[], Any]) -> float:
    """How long it takes once."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e6


def calls(driver: CudaDriver, pages: int) -> dict[str, float]:
    """Each call, page by page, and access for all of them at once."""
    size = driver.granularity
    base = driver.reserve(pages * size)
    addresses = [base + page * size for page in range(pages)]
    handles = []
    cost = {"create": timed_us(lambda: handles.extend(driver.create(size) for _ in addresses))}
    pairs = list(zip(addresses, handles, strict=True))
    cost["map"] = timed_us(lambda: [driver.map(at, size, handle) for at, handle in pairs])
    cost["access_each"] = timed_us(lambda: [driver.set_access(at, size) for at in addresses])
    cost["unmap"] = timed_us(lambda: [driver.unmap(at, size) for at in addresses])
    for at, handle in pairs:
        driver.map(at, size, handle)
    cost["access_run"] = timed_us(lambda: driver.set_access(base, pages * size))
    cost["zero"] = timed_us(lambda: (driver.fill(base, 0, pages * size), driver.synchronize()))
    for at in addresses:
        driver.unmap(at, size)
    cost["release"] = timed_us(lambda: [driver.release(handle) for handle in handles])
    driver.unreserve(base, pages * size)
    return {name: round(took_us / pages, 2) for name, took_us in cost.items()}


def unmaps_runs(driver: CudaDriver) -> bool:
    """Whether one call unmaps two neighbours, which no document promises."""
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


def balloon(driver: CudaDriver, pages: int, most_spare: int) -> dict[str, float]:
    """Half of a KV cache of so many pages goes and comes back."""
    reservation = Reservation(driver, pages * driver.granularity, most_spare=most_spare)
    extent = Extent(reservation.address, reservation.page_bytes, reservation.page_bytes)
    backend = reservation.backend([extent], Granules(pages, 1))
    half = range(pages // 2, pages)
    free = driver.free_bytes()
    cost = {"release": timed_us(lambda: backend.release(half))}
    grown = driver.free_bytes() - free
    cost["restore"] = timed_us(lambda: backend.restore(half))
    result = {name: round(took_us) for name, took_us in cost.items()}
    result |= {"returned_bytes": pages // 2 * reservation.page_bytes, "free_grew_by_bytes": grown}
    reservation.close()
    return result


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=512, help="pages in the KV cache (512)")
    pages = parser.parse_args().pages
    try:
        driver = open_driver()
    except DeviceError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    calls(driver, 8)  # The first calls of a process are not like the others.
    result = {
        "page_bytes": driver.granularity,
        "pages": pages,
        "calls_us_a_page": calls(driver, pages),
        "one_unmap_for_a_run": unmaps_runs(driver),
        "balloon_us": balloon(driver, pages, most_spare=0),
        "balloon_us_pages_kept": balloon(driver, pages, most_spare=pages),
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
