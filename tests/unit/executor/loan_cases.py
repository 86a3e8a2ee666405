"""A host that lends pages of a stand-in GPU and guests that borrow them, in one test process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.cuda.page_pool import PageClient, PagePool
from executor.cuda.page_server import PageServer
from tests.fakes.driver import PAGE, StandInDevice, StandInDriver

RESERVE = 2


class Rig:
    """A host that lends and a guest that borrows, as two processes on one device."""

    def __init__(self, folder: Path, total: int) -> None:
        self.path = folder / "pages"
        self.device = StandInDevice(total * PAGE)
        self.host = StandInDriver(self.device)
        self.guest = StandInDriver(self.device)
        self.host_pool = PagePool(self.host, PAGE)
        self.lender = PageServer(self.host, PAGE, self.path, self.host_pool, reserve=RESERVE)
        self.guest_pool = PagePool(self.guest, PAGE)

    def borrow(self) -> PageClient:
        return PageClient(self.guest, PAGE, self.path, self.guest_pool)

    def stock(self, pages: int) -> None:
        self.lender.give(self.host_pool.take(pages))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    before = open_descriptors()
    made = Rig(tmp_path, total=64)
    yield made
    made.lender.close()
    made.host.die()
    made.guest.die()
    assert made.device.used_bytes == 0
    assert open_descriptors() <= before, "a descriptor of a page stayed open"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settle(rig: Rig, *borrowers: PageClient) -> None:
    for _ in range(6):
        rig.lender.step()
        for borrower in borrowers:
            borrower.step()
