"""Piece `pages`: time of a physical page, and of a gibibyte from a guest to a host.

`python -m bench.gpu.pages OPENER PAGES SOCKET` is the guest's process, which holds memory:

stdin    free        fill      share       unmap      map
stdout   done        done      done        done       done
         released    mapped    by handle   kept       zeroed

End of file: gives everything back and ends.
"""

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, cast

from bench.gpu.kernels import spread
from bench.gpu.pieces import PieceError, Sizes
from executor.cuda.backing import Reservation
from executor.cuda.driver import Driver, Handle, open_driver
from executor.errors import DeviceError
from executor.kv.backing import Extent
from executor.kv.shrink_plan import Granules

# `module:function` that opens the driver of the process's first GPU.
OPENER: Final = "executor.cuda.driver:open_driver"
FREE, FILL, SHARE, UNMAP, MAP, DONE = "free", "fill", "share", "unmap", "map", "done"
GIB: Final = 1 << 30
# Descriptors in one message: the kernel takes 253.
BATCH: Final = 64
Handles = list[Handle]
Times = dict[str, list[float]]


def opened(opener: str) -> Driver:
    """Open the driver by `module:function`."""
    module, _, function = opener.partition(":")
    return cast("Driver", getattr(importlib.import_module(module), function)())


class PageRange:
    """`pages` pages of the driver's own size, numbered from the range's start."""

    def __init__(self, driver: Driver, pages: int) -> None:
        self.driver = driver
        self.pages = pages
        self.page_bytes = driver.granularity
        self._base = driver.reserve(pages * self.page_bytes)

    def map(self, page: int, handle: Handle) -> None:
        self.driver.map(self._address(page), self.page_bytes, handle)

    def unmap(self, page: int) -> None:
        self.driver.unmap(self._address(page), self.page_bytes)

    def allow(self, first: int, pages: int) -> None:
        """Let the card access a run of mapped pages."""
        self.driver.set_access(self._address(first), pages * self.page_bytes)

    def zero(self, first: int, pages: int) -> None:
        """Overwrite a run of pages, so that another process's data is gone, and wait for it."""
        self.driver.fill(self._address(first), 0, pages * self.page_bytes)
        self.driver.synchronize()

    def create_all(self) -> Handles:
        """Create a page for each address."""
        return [self.driver.create(self.page_bytes) for _ in range(self.pages)]

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
            self.driver.release(handle)

    def close(self) -> None:
        """Give the addresses back; nothing may be mapped."""
        self.driver.unreserve(self._base, self.pages * self.page_bytes)

    def _address(self, page: int) -> int:
        return self._base + page * self.page_bytes


class HandedPages:
    """Pages of the guest's process, mapped from the start on; a method for each command."""

    def __init__(self, driver: Driver, pages: int, to: socket.socket) -> None:
        self._to = to
        self._range = PageRange(driver, pages)
        self._handles: Handles = []
        self._mapped = False
        self.fill()

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
            handles = self._handles[at : at + BATCH]
            part = [self._range.driver.export_handle(handle) for handle in handles]
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


class GuestPages:
    """Host's side of the guest's process."""

    def __init__(self, process: "subprocess.Popen[str]", source: socket.socket) -> None:
        self._process = process
        self.source = source
        self.finish()

    def do(self, word: str) -> None:
        """Send a command and wait until it is done."""
        self.begin(word)
        self.finish()

    def begin(self, word: str) -> None:
        """Send a command."""
        assert self._process.stdin
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PieceError("the guest's process ended in the middle; see the log") from error

    def finish(self) -> None:
        """Wait for the command that was begun."""
        assert self._process.stdout
        if self._process.stdout.readline().strip() != DONE:
            raise PieceError("the guest's process ended in the middle; see the log")


@contextmanager
def guest_process(opener: str, pages: int) -> Iterator[GuestPages]:
    """Start a process that holds so many pages."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", __spec__.name, opener, str(pages), str(theirs.fileno())]
    with (
        ours,
        subprocess.Popen(  # noqa: S603 -- our own
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=(theirs.fileno(),),
        ) as process,
    ):  # fmt: skip
        theirs.close()
        try:
            yield GuestPages(process, ours)
            assert process.stdin
            process.stdin.close()
            if process.wait() != 0:
                raise PieceError("the guest's process could not give its pages back; see the log")
        finally:
            if process.poll() is None:
                process.kill()


def through_driver(driver: Driver, guest: GuestPages, pages: int, rounds: int) -> Times:
    """Time a move in which the guest frees memory and the host allocates, by the driver's pool."""
    times: Times = {}
    memory = PageRange(driver, pages)
    for _ in range(rounds):
        with _move(times, guest, FREE):
            handles = memory.create_all()
            memory.map_all(handles)
        memory.unmap_all()
        memory.release_all(handles)
        guest.do(FILL)
    memory.close()
    return times


def by_handle(driver: Driver, guest: GuestPages, pages: int, rounds: int) -> Times:
    """Time a move in which the guest unmaps pages and the host maps its handles of them."""
    times: Times = {}
    memory = PageRange(driver, pages)

    def shared() -> Handles:
        guest.begin(SHARE)
        handles = received(driver, pages, guest.source)
        guest.finish()
        return handles

    handles = _timed(times, "shared_s", shared)
    for _ in range(rounds):
        with _move(times, guest, UNMAP):
            memory.map_all(handles)
        memory.unmap_all()
        guest.do(MAP)
    memory.release_all(handles)
    memory.close()
    return times


@contextmanager
def _move(times: Times, guest: GuestPages, word: str) -> Iterator[None]:
    """Time the guest's part, the host's, which is the block, and both."""
    started_s = time.perf_counter()
    guest.do(word)
    given_s = time.perf_counter()
    yield
    ended_s = time.perf_counter()
    times.setdefault("given_s", []).append(given_s - started_s)
    times.setdefault("taken_s", []).append(ended_s - given_s)
    times.setdefault("moved_s", []).append(ended_s - started_s)


def _timed(times: Times, name: str, work: Callable[[], Any]) -> Any:  # noqa: ANN401 -- work's own
    started_s = time.perf_counter()
    found = work()
    times.setdefault(name, []).append(time.perf_counter() - started_s)
    return found


def _spreads(times: Times) -> dict[str, dict[str, float]]:
    return {name: spread(values) for name, values in times.items()}


def run(sizes: Sizes, place: str) -> dict[str, Any]:
    """Measure with the backend of this tree: pages as such, then under a KV balloon."""
    measured = measure(OPENER, sizes.rounds, GIB)
    return measured | {"balloon": measure_balloon(open_driver(), measured["pages"], sizes.rounds)}


def measure(opener: str, rounds: int, moved_bytes: int) -> dict[str, Any]:
    """Move `moved_bytes` so many times within a process, then between two.

    `each_s`: one call for one page. `at_once_s`: one call for all of them. In both ways between
    processes, `moved_s` is from the host's command until it may use zeroed pages.
    """
    driver = opened(opener)
    pages = moved_bytes // driver.granularity
    memory = PageRange(driver, pages)
    each: Times = {}
    at_once: Times = {}
    for _ in range(rounds):
        _round(memory, each, at_once)
    memory.close()
    with guest_process(opener, pages) as guest:
        ways = {
            "through_driver": through_driver(driver, guest, pages, rounds),
            "by_handle": by_handle(driver, guest, pages, rounds),
        }
    return {
        "page_bytes": driver.granularity,
        "pages": pages,
        "each_s": _spreads(each),
        "at_once_s": _spreads(at_once),
        **{name: _spreads(times) for name, times in ways.items()},
    }


def _round(memory: PageRange, each: Times, at_once: Times) -> None:
    """Time each page alone, then access and zeroes for all at once."""
    numbers, driver = range(memory.pages), memory.driver
    create = partial(driver.create, memory.page_bytes)
    handles = [_timed(each, "create", create) for _ in numbers]
    for page, handle in enumerate(handles):
        _timed(each, "map", partial(memory.map, page, handle))
    for page in numbers:
        _timed(each, "access", partial(memory.allow, page, 1))
    for page in numbers:
        _timed(each, "zero", partial(memory.zero, page, 1))
    for page in numbers:
        _timed(each, "unmap", partial(memory.unmap, page))
    for page, handle in enumerate(handles):
        memory.map(page, handle)
    _timed(at_once, "access", partial(memory.allow, 0, memory.pages))
    _timed(at_once, "zero", partial(memory.zero, 0, memory.pages))
    memory.unmap_all()
    for handle in handles:
        _timed(each, "release", partial(driver.release, handle))


def measure_balloon(driver: Driver, pages: int, rounds: int) -> dict[str, Any]:
    """Measure a cache of so many pages, with its pages returned to the card, then with them kept.

    `free_grew_by_bytes`: growth of the card's own figure when the first half went.
    `one_unmap_for_a_run`: whether one call unmaps two neighbours, which no document promises.
    """
    return {
        "pages": pages // 2,
        "one_unmap_for_a_run": unmaps_runs(driver),
        "returned": _balloon(driver, pages, rounds, most_spare=0),
        "kept": _balloon(driver, pages, rounds, most_spare=pages),
    }


def unmaps_runs(driver: Driver) -> bool:
    """Unmap two neighbours in one call; returns whether both went."""
    memory = PageRange(driver, 2)
    handles = memory.create_all()
    for page, handle in enumerate(handles):
        memory.map(page, handle)
    whole = False
    base = memory._address(0)
    with suppress(DeviceError):
        driver.unmap(base, 2 * memory.page_bytes)
        whole = True
    for page in range(2):
        # The driver refuses to unmap a page that is unmapped already.
        with suppress(DeviceError):
            memory.unmap(page)
            whole = False
    memory.release_all(handles)
    memory.close()
    return whole


def _balloon(driver: Driver, pages: int, rounds: int, most_spare: int) -> dict[str, Any]:
    reservation = Reservation(driver, pages * driver.granularity, most_spare=most_spare)
    extent = Extent(reservation.address, reservation.page_bytes, reservation.page_bytes)
    backend = reservation.backend([extent], Granules(pages, 1))
    half = range(pages // 2, pages)
    free, grew = driver.free_bytes(), []
    times: Times = {}
    for _ in range(rounds):
        _timed(times, "release_s", partial(backend.release, half))
        grew.append(driver.free_bytes() - free)
        _timed(times, "restore_s", partial(backend.restore, half))
    reservation.close()
    return {"free_grew_by_bytes": grew[0], **_spreads(times)}


def main() -> None:
    """Serve the host until it closes the pipe."""
    opener, pages, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with socket.socket(fileno=number) as to:
        guest = HandedPages(opened(opener), pages, to)
        words = {word: getattr(guest, word) for word in (FREE, FILL, SHARE, UNMAP, MAP)}
        sys.stdout.write(DONE + "\n")
        sys.stdout.flush()
        for line in sys.stdin:
            words[line.strip()]()
            sys.stdout.write(DONE + "\n")
            sys.stdout.flush()
        guest.close()


if __name__ == "__main__":
    main()
