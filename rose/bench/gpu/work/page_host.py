"""The host's side of a gibibyte that a guest gives: the guest's process, and the pages taken."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from executor.cuda.driver import Driver
from rose.bench.gpu.errors import PieceError
from rose.bench.gpu.work import page_guest as words
from rose.bench.gpu.work.page_guest import received
from rose.bench.gpu.work.page_range import PageRange

Times = dict[str, list[float]]
_GONE = "the guest's process ended in the middle; see the log"


class GuestProcess:
    """What the host says to it, and waits for."""

    def __init__(self, tell: IO[str], hear: IO[str], source: socket.socket) -> None:
        self._tell = tell
        self._hear = hear
        self.source = source
        self._wait()

    def do(self, word: str) -> None:
        """Return when it is done."""
        self.begin(word)
        self._wait()

    def begin(self, word: str) -> None:
        """Say it and return."""
        try:
            self._tell.write(word + "\n")
            self._tell.flush()
        except BrokenPipeError as error:
            raise PieceError(_GONE) from error

    def finish(self) -> None:
        """Wait for what was begun."""
        self._wait()

    def _wait(self) -> None:
        if self._hear.readline().strip() != words.DONE:
            raise PieceError(_GONE)


@contextmanager
def guest_process(opener: str, pages: int) -> Iterator[GuestProcess]:
    """A process that holds so many pages."""
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
    """The guest frees its memory and the host allocates: the driver's own pool is between them."""
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
    """The host has a handle of each page from before: the guest unmaps it, the host maps it."""
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
