"""Piece `pages`: time of a physical page, and of a gibibyte from a guest to a host."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any, Final

from bench.gpu.pieces import PieceError
from bench.gpu.sizes import Sizes
from bench.gpu.work import page_guest as words
from bench.gpu.work.page_guest import OPENER, PageRange, opened, received
from bench.gpu.work.timing import spread
from executor.cuda.backing import Reservation
from executor.cuda.driver import Driver, open_driver
from executor.errors import DeviceError
from executor.kv.backing import Extent
from executor.kv.shrink_plan import Granules

RETURNED, KEPT = "returned", "kept"
_SPARE: Final = {RETURNED: 0, KEPT: 1}


def measure_balloon(driver: Driver, pages: int, rounds: int) -> dict[str, Any]:
    """Measure a cache of so many pages, with its pages returned to the card, then with them kept.

    `free_grew_by_bytes`: growth of the card's own figure when the first half went.
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
        # The driver refuses to unmap a page that is unmapped already.
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


Times = dict[str, list[float]]
_GONE = "the guest's process ended in the middle; see the log"


class GuestProcess:
    """Host's side of a guest's process."""

    def __init__(self, tell: IO[str], hear: IO[str], source: socket.socket) -> None:
        self._tell = tell
        self._hear = hear
        self.source = source
        self._wait()

    def do(self, word: str) -> None:
        """Send a command and wait until it is done."""
        self.begin(word)
        self._wait()

    def begin(self, word: str) -> None:
        """Send a command."""
        try:
            self._tell.write(word + "\n")
            self._tell.flush()
        except BrokenPipeError as error:
            raise PieceError(_GONE) from error

    def finish(self) -> None:
        """Wait for the command that was begun."""
        self._wait()

    def _wait(self) -> None:
        if self._hear.readline().strip() != words.DONE:
            raise PieceError(_GONE)


@contextmanager
def guest_process(opener: str, pages: int) -> Iterator[GuestProcess]:
    """Start a process that holds so many pages."""
    ours, theirs = socket.socketpair()
    command = [
        sys.executable, "-m", words.__name__, opener, str(pages), str(theirs.fileno()),
    ]  # fmt: skip
    with (
        ours,
        subprocess.Popen(  # noqa: S603 -- our own
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=(theirs.fileno(),), env=os.environ,
        ) as process,
    ):  # fmt: skip
        theirs.close()
        try:
            if process.stdin is None or process.stdout is None:
                raise PieceError("the guest's process has no pipes")
            yield GuestProcess(process.stdin, process.stdout, ours)
            process.stdin.close()
            if process.wait() != 0:
                raise PieceError("the guest's process could not give its pages back; see the log")
        finally:
            if process.poll() is None:
                process.kill()


def through_driver(driver: Driver, guest: GuestProcess, pages: int, rounds: int) -> Times:
    """Time a move in which the guest frees memory and the host allocates, by the driver's pool."""
    times: Times = {"given_s": [], "taken_s": [], "moved_s": []}
    memory = PageRange(driver, pages)
    for _ in range(rounds):
        started_s = time.perf_counter()
        guest.do(words.FREE)
        given_s = time.perf_counter()
        handles = memory.create_all()
        memory.map_all(handles)
        _note(times, started_s, given_s, time.perf_counter())
        memory.unmap_all()
        memory.release_all(handles)
        guest.do(words.FILL)
    memory.close()
    return times


def by_handle(driver: Driver, guest: GuestProcess, pages: int, rounds: int) -> Times:
    """Time a move in which the guest unmaps pages and the host maps its handles of them."""
    times: Times = {"shared_s": [], "given_s": [], "taken_s": [], "moved_s": []}
    memory = PageRange(driver, pages)
    started_s = time.perf_counter()
    guest.begin(words.SHARE)
    handles = received(driver, pages, guest.source)
    guest.finish()
    times["shared_s"].append(time.perf_counter() - started_s)
    for _ in range(rounds):
        started_s = time.perf_counter()
        guest.do(words.UNMAP)
        given_s = time.perf_counter()
        memory.map_all(handles)
        _note(times, started_s, given_s, time.perf_counter())
        memory.unmap_all()
        guest.do(words.MAP)
    memory.release_all(handles)
    memory.close()
    return times


def _note(times: Times, started_s: float, given_s: float, ended_s: float) -> None:
    times["given_s"].append(given_s - started_s)
    times["taken_s"].append(ended_s - given_s)
    times["moved_s"].append(ended_s - started_s)


GIB = 1 << 30


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
    numbers = range(memory.pages)
    handles = [_timed(each, "create", memory.create) for _ in numbers]
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
        _timed(each, "release", partial(memory.release, handle))


def _timed(times: Times, name: str, work: Callable[[], Any]) -> Any:  # noqa: ANN401 -- work's own
    started_s = time.perf_counter()
    found = work()
    times.setdefault(name, []).append(time.perf_counter() - started_s)
    return found


def _spreads(times: Times) -> dict[str, dict[str, float]]:
    return {name: spread(values) for name, values in times.items()}
