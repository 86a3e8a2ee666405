"""A process that borrows pages over a real socket; only its GPU is a stand-in.

argv: the socket, the device's UUID, pages. Takes all that is lent, and says a word when it has so
many pages. Gives back what is wanted once a line came on standard input, and never before.
"""

import os
import select
import sys
import time
from pathlib import Path

from executor.cuda.driver import Handle
from executor.cuda.page_pool import PageClient, PagePool
from tests.fakes.driver import PAGE, Physical, StandInDevice, StandInDriver


class ForeignDriver(StandInDriver):
    """Takes any descriptor for memory of its device: its owner is another process."""

    def import_handle(self, descriptor: int) -> Handle:
        os.fstat(descriptor)  # It is one.
        self._begin("import_handle")
        return self._handle_of(Physical(PAGE))


def main(path: Path, uuid: bytes, expected: int) -> None:
    device = StandInDevice(PAGE)
    device.uuid = uuid
    driver = ForeignDriver(device)
    borrower = PageClient(driver, PAGE, path, PagePool(driver, PAGE))
    pages: list[Handle] = []
    obeys = False
    while True:
        borrower.step()
        pages += borrower.take(borrower.unmapped)
        if len(pages) == expected:
            sys.stdout.write("taken\n")
            sys.stdout.flush()
            expected = 0
        obeys = obeys or bool(select.select([sys.stdin], [], [], 0)[0])
        if obeys and borrower.wanted:
            wanted = min(len(pages), borrower.wanted)
            borrower.give([pages.pop() for _ in range(wanted)])
        time.sleep(0.001)


if __name__ == "__main__":
    main(Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
