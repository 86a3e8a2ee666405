"""Calls to the driver for a gibibyte, by handle and through the driver."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.cuda.backing import CudaPages, Reservation
from executor.cuda.page_pool import PageClient, PagePool, PageSource
from executor.cuda.page_server import PageServer
from executor.kv.backing import Extent
from executor.kv.shrink_plan import Granules
from tests.fakes.driver import PAGE, StandInDevice, StandInDriver

PAGES = (1 << 30) // PAGE
GRANULE_PAGES = 1
"""Pages of a granule of an 8B model, 16 tokens of whose KV in all layers fill a page."""
GRANULES = PAGES // GRANULE_PAGES


def cache(
    driver: StandInDriver, source: PageSource, *, partly: bool
) -> tuple[Reservation, CudaPages]:
    """A gibibyte in which a granule is a page."""
    reservation = Reservation(driver, PAGES * PAGE, source=source, partly=partly)
    extent = Extent(reservation.address, PAGE, PAGE)
    return reservation, reservation.backend([extent], Granules(PAGES, GRANULE_PAGES))


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[dict[str, Counter[str]]]:
    """Calls of each part of a gibibyte's way to a guest and back, by handle."""
    device = StandInDevice((PAGES + 64) * PAGE)
    host, guest = StandInDriver(device), StandInDriver(device)
    lender = PageServer(host, PAGE, tmp_path / "pages", PagePool(host, PAGE))
    _, ours = cache(host, lender, partly=False)
    own = PagePool(guest, PAGE)
    borrower = PageClient(guest, PAGE, tmp_path / "pages", own)
    found: dict[str, Counter[str]] = {}

    def since(name: str, driver: StandInDriver) -> None:
        found[name] = +driver.calls
        driver.calls.clear()

    every = range(GRANULES)
    host.calls.clear()
    ours.release(every)
    since("host releases", host)
    while borrower.borrowed < PAGES:
        lender.step()
        borrower.step()
    since("host lends", host)
    theirs = Reservation(guest, PAGES * PAGE, source=borrower)
    pages = theirs.backend([Extent(theirs.address, PAGE, PAGE)], Granules(PAGES, GRANULE_PAGES))
    guest.calls.clear()
    lender.recall(PAGES)
    lender.step()
    borrower.step()
    pages.release(every)
    since("guest returns", guest)
    while lender.available < PAGES:
        borrower.step()
        lender.step()
    host.calls.clear()
    ours.restore(every)
    since("host takes back", host)
    yield found
    borrower.close()
    lender.close()


def test_a_gibibyte_by_handle(calls: dict[str, Counter[str]]) -> None:
    assert calls["host takes back"] == {
        "unmap": PAGES,
        "map": PAGES,
        "set_access": 1,
        "fill": 1,
        "synchronize": 1,
    }
    assert calls["guest returns"] == {
        "unmap": PAGES,
        "map": PAGES,
        "set_access": 1,
        "release": PAGES,
    }
    assert calls["host releases"] == {"unmap": PAGES, "map": PAGES, "set_access": 1}
    # Sixteen pages a message: each is mapped to be zeroed, and the alias page put back.
    messages = PAGES // 16
    assert calls["host lends"] == {
        "unmap": 2 * PAGES,
        "map": 2 * PAGES,
        "set_access": 2 * messages,
        "fill": messages,
        "synchronize": messages,
        "export_handle": PAGES,
    }


def test_a_gibibyte_through_the_driver() -> None:
    device = StandInDevice((PAGES + 64) * PAGE)
    driver = StandInDriver(device)
    _, pages = cache(driver, PagePool(driver, PAGE), partly=False)
    driver.calls.clear()
    pages.release(range(GRANULES))
    assert driver.calls == {"unmap": PAGES, "map": PAGES, "set_access": 1, "release": PAGES}
    driver.calls.clear()
    pages.restore(range(GRANULES))
    assert driver.calls == {
        "free_bytes": 1,
        "create": PAGES,
        "unmap": PAGES,
        "map": PAGES,
        "set_access": 1,
        "fill": 1,
        "synchronize": 1,
    }
