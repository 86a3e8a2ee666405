"""`python -m bench.gpu.work.page_guest OPENER PAGES SOCKET`: holder of memory for a host's tests.

stdin    free        fill      share       unmap      map
stdout   done        done      done        done       done
         released    mapped    by handle   kept       zeroed
End of file: gives everything back and ends.
"""

import importlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import cast

from executor.cuda.driver import Driver, Handle

# `module:function` that opens the driver of the process's first GPU.
OPENER = "executor.cuda.driver:open_driver"


def opened(opener: str) -> Driver:
    """Open the driver by `module:function`."""
    module, _, function = opener.partition(":")
    return cast("Driver", getattr(importlib.import_module(module), function)())


Handles = list[Handle]


class PageRange:
    """`pages` pages of the driver's own size, numbered from the range's start."""

    def __init__(self, driver: Driver, pages: int) -> None:
        self._driver = driver
        self.pages = pages
        self.page_bytes = driver.granularity
        self._base = driver.reserve(pages * self.page_bytes)

    def create(self) -> Handle:
        return self._driver.create(self.page_bytes)

    def release(self, handle: Handle) -> None:
        self._driver.release(handle)

    def map(self, page: int, handle: Handle) -> None:
        self._driver.map(self._address(page), self.page_bytes, handle)

    def unmap(self, page: int) -> None:
        self._driver.unmap(self._address(page), self.page_bytes)

    def allow(self, first: int, pages: int) -> None:
        """Let the card access a run of mapped pages."""
        self._driver.set_access(self._address(first), pages * self.page_bytes)

    def zero(self, first: int, pages: int) -> None:
        """Overwrite a run of pages, so that another process's data is gone, and wait for it."""
        self._driver.fill(self._address(first), 0, pages * self.page_bytes)
        self._driver.synchronize()

    def create_all(self) -> Handles:
        """Create a page for each address."""
        return [self.create() for _ in range(self.pages)]

    def map_all(self, handles: Sequence[Handle]) -> None:
        """Map zeroed pages under all addresses, ready for use."""
        for page, handle in enumerate(handles):
            self.map(page, handle)
        self.allow(0, self.pages)
        self.zero(0, self.pages)

    def unmap_all(self) -> None:
        for page in range(self.pages):
            self.unmap(page)

    def release_all(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            self.release(handle)

    def close(self) -> None:
        """Give the addresses back; nothing may be mapped."""
        self._driver.unreserve(self._base, self.pages * self.page_bytes)

    def _address(self, page: int) -> int:
        return self._base + page * self.page_bytes


FREE, FILL, SHARE, UNMAP, MAP, DONE = "free", "fill", "share", "unmap", "map", "done"
# Descriptors in one message: the kernel takes 253.
BATCH = 64


class Guest:
    """A process's pages, mapped from the start on."""

    def __init__(self, driver: Driver, pages: int, to: socket.socket) -> None:
        self._driver = driver
        self._to = to
        self._range = PageRange(driver, pages)
        self._handles: Handles = []
        self._mapped = False
        self.fill()

    def obey(self, word: str) -> None:
        """Run the host's command."""
        words: dict[str, Callable[[], None]] = {
            FREE: self.free, FILL: self.fill, SHARE: self.share,
            UNMAP: self.unmap, MAP: self.map,
        }  # fmt: skip
        words[word]()

    def free(self) -> None:
        """Give the memory to the driver."""
        self.unmap()
        self._range.release_all(self._handles)
        self._handles = []

    def fill(self) -> None:
        """Take it from the driver."""
        self._handles = self._range.create_all()
        self.map()

    def unmap(self) -> None:
        """Keep the memory, for the process that shares it."""
        self._range.unmap_all()
        self._mapped = False

    def map(self) -> None:
        """Map the memory again."""
        self._range.map_all(self._handles)
        self._mapped = True

    def share(self) -> None:
        """Send a descriptor of each page."""
        for at in range(0, len(self._handles), BATCH):
            part = [self._driver.export_handle(h) for h in self._handles[at : at + BATCH]]
            socket.send_fds(self._to, [b"."], part)
            _close(part)

    def close(self) -> None:
        if self._mapped:
            self.free()
        self._range.close()


def received(driver: Driver, pages: int, source: socket.socket) -> Handles:
    """Receive handles of all pages that a guest shares."""
    handles: Handles = []
    while len(handles) < pages:
        message, descriptors, _flags, _from = socket.recv_fds(source, 1, BATCH)
        if not message:
            raise EOFError("the guest's process ended in the middle")
        handles += [driver.import_handle(descriptor) for descriptor in descriptors]
        _close(descriptors)
    return handles


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve the host until it closes the pipe."""
    opener, pages, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with socket.socket(fileno=number) as to:
        guest = Guest(opened(opener), pages, to)
        _say(DONE)
        for line in sys.stdin:
            guest.obey(line.strip())
            _say(DONE)
        guest.close()


if __name__ == "__main__":
    main()
