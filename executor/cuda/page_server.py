"""Page server: lends pages that their owner does not need now to other processes of the same GPU.

The owner keeps a handle of every page that it lent, so taking one back costs no allocation. The
price is trust: a driver has no call that takes a page away from another process, so a borrower's
word that it unmapped one is accepted. Everything else in its messages is checked. One that breaks a
rule gets no more pages, and its pages wait until its process has ended.

`LoanLedger` is the core: pages in stock, pages lent by borrower, and pages wanted back.

    stock ── lend ──> out ── returned ──> stock
    out ── its borrower broke the rules, or hung up ──> stranded ── its process ended ──> stock

Until a borrower reports that it unmapped a page, or its process is known to have ended, the page
may be written to at any time: no other process gets it.
"""

import logging
import os
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count as counter
from pathlib import Path
from typing import Final

from executor.cuda.backing import VirtualMapping
from executor.cuda.driver import Driver, Handle
from executor.cuda.page_messages import (
    EVERYTHING,
    MOST_PAGES,
    Hello,
    HungUp,
    Lend,
    RequestPages,
    Return,
    Revoke,
    close_all,
    has_ended,
    peer_process,
    receive,
    send,
)
from executor.cuda.page_pool import PagePool, PageSource
from executor.errors import DeviceMemoryShort, LoanError

_NOBODY: Final = -1
logger = logging.getLogger("vllm.rose.kv")
MOST_BORROWERS: Final = 4
# Frames of one borrower in one step.
MOST_FRAMES: Final = 8
# Bounds the wait of an owner's request that arrives meanwhile: each page is unmapped and mapped
# twice to be zeroed, and exported.
MOST_LENT_A_STEP: Final = 16


class LoanLedger:
    """Record of a lender's pages by number: in stock, lent to a borrower, or stranded.

    A borrower is a number of the caller's that is never used twice.
    """

    def __init__(self, reserve: int) -> None:
        """Create an empty ledger.

        reserve: number of pages in stock that are never lent.
        """
        self._reserve = reserve
        self._stock: list[int] = []
        self._out: dict[int, int] = {}
        self._stranded: dict[int, int] = {}

    @property
    def in_stock(self) -> int:
        """Number of pages that no process uses, the reserve included."""
        return len(self._stock)

    @property
    def lendable(self) -> int:
        """Number of pages in stock beyond the reserve."""
        return max(0, len(self._stock) - self._reserve)

    @property
    def stranded(self) -> int:
        """Number of pages of refused borrowers whose processes still live."""
        return len(self._stranded)

    def out(self, borrower: int) -> int:
        """Return the number of pages that a borrower has."""
        return sum(who == borrower for who in self._out.values())

    def put(self, numbers: Iterable[int]) -> None:
        """Add pages, by number, to the stock."""
        self._stock += numbers

    def take(self, most: int) -> list[int]:
        """Remove up to `most` pages from the stock, the reserve included, and return their numbers.

        They are for the owner's own use.
        """
        first = max(0, len(self._stock) - most)
        taken = self._stock[first:]
        del self._stock[first:]
        return taken

    def lend(self, borrower: int, most: int) -> tuple[int, ...]:
        """Move up to `most` pages beyond the reserve to a borrower, and return their numbers."""
        lent = self.take(min(most, self.lendable))
        self._out.update(dict.fromkeys(lent, borrower))
        return tuple(lent)

    def returned(self, borrower: int, numbers: Collection[int]) -> None:
        """Put returned pages into the stock; raise LoanError if any was not lent to the borrower.

        Then none is put back, and the caller must not trust the borrower any more.
        """
        foreign = [number for number in numbers if self._out.get(number, _NOBODY) != borrower]
        if foreign:
            raise LoanError(f"a borrower returns page {foreign[0]}, which was not lent to it")
        for number in numbers:
            del self._out[number]
        self._stock += numbers

    def left(self, borrower: int) -> None:
        """Mark all pages of a borrower as stranded, since it is refused from now on."""
        for number in [number for number, who in self._out.items() if who == borrower]:
            self._stranded[number] = self._out.pop(number)

    def ended(self, borrower: int) -> int:
        """Put the pages of a borrower whose process ended into the stock; return their number."""
        self.left(borrower)
        back = [number for number, who in self._stranded.items() if who == borrower]
        for number in back:
            del self._stranded[number]
        self._stock += back
        return len(back)


@dataclass(slots=True)
class _Borrower:
    """Connected process; `connection` is None once it is refused, `process` is its pidfd.

    asked: number of pages that it may still be sent. keep: bound last sent to it.
    """

    number: int
    connection: socket.socket | None
    process: int
    greeted: bool = False
    asked: int = 0
    keep: int = EVERYTHING


class PageServer(PageSource):
    """Source of the host that owns the pages and lends unused ones to other processes of its GPU.

    One thread calls it; `step` does all work for the borrowers.
    """

    def __init__(
        self, driver: Driver, page_bytes: int, path: Path, pool: PagePool, *, reserve: int = 0
    ) -> None:
        """Listen on a Unix socket at `path`.

        pool: source of new pages. reserve: number of pages in stock that are never lent. Raises
        LoanError if it cannot listen, for instance because another lender lives there.
        """
        self._driver = driver
        self._hello = Hello(driver.device, page_bytes)
        self._pool = pool
        self._book = LoanLedger(reserve)
        self._handles: dict[int, Handle] = {}
        self._numbers = counter(1)
        self._names = counter(1)
        self._borrowers: list[_Borrower] = []
        self._goal = 0
        self._path = path
        self._listener = _listen(path)
        self._window = VirtualMapping(driver, page_bytes, MOST_LENT_A_STEP)

    @property
    def idle(self) -> int:
        """Number of pages in stock, and of those that the pool keeps."""
        return self._book.in_stock + self._pool.idle

    @property
    def lent(self) -> int:
        """Number of pages that other processes have, or may still have."""
        return len(self._handles) - self._book.in_stock

    @property
    def available(self) -> int:
        """Number of unused pages, the reserve included; lent ones are not replaced by new ones."""
        return self.idle

    def take(self, count: int) -> list[Handle]:
        """Return the handles of `count` pages: the stock's, the reserve included, then new ones.

        On DeviceMemoryShort the missing pages are revoked from borrowers, so that a later call
        succeeds.
        """
        try:
            created = self._pool.take(max(0, count - self._book.in_stock))
        except DeviceMemoryShort:
            self.recall(count)
            raise
        self.recall(0)
        return [self._handles.pop(number) for number in self._book.take(count)] + created

    def give(self, handles: Collection[Handle]) -> None:
        """Put pages into the stock, from which they may be lent."""
        numbers = {next(self._numbers): handle for handle in handles}
        self._handles.update(numbers)
        self._book.put(numbers)

    def recall(self, count: int) -> None:
        """Revoke lent pages until `count` are in stock; lend no page until a call with 0."""
        self._goal = count

    def step(self) -> bool:
        """Handle the borrowers' messages, lend and revoke, without waiting.

        Returns True if there is more to lend to a connected borrower.
        """
        self._accept()
        for borrower in list(self._borrowers):
            if has_ended(borrower.process):
                self._forget(borrower)
            with self._hanging_up(borrower):
                self._hear(borrower)
        wanted = max(0, self._goal - self._book.in_stock)
        for borrower in self._borrowers:
            with self._hanging_up(borrower):
                wanted -= self._ask_back(borrower, wanted)
                if borrower.greeted and not self._goal:
                    self._lend(borrower)
        greeted = any(borrower.greeted for borrower in self._borrowers)
        return greeted and not self._goal and self._book.lendable > 0

    def close(self) -> None:
        """Stop lending, and release all pages; the device has them once no borrower has."""
        if self._listener.fileno() < 0:
            return
        for borrower in self._borrowers:
            self._hang_up(borrower)
            os.close(borrower.process)
        self._borrowers.clear()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._window.close()
        for handle in self._handles.values():
            self._driver.release(handle)
        self._handles.clear()
        self._pool.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        if len(self._borrowers) >= MOST_BORROWERS:
            logger.warning("more than %d processes ask for pages: refused", MOST_BORROWERS)
            connection.close()
            return
        try:
            process = peer_process(connection)
        except LoanError as error:
            logger.warning("%s", error)
            connection.close()
            return
        self._borrowers.append(_Borrower(next(self._names), connection, process))

    def _hear(self, borrower: _Borrower) -> None:
        for _ in range(MOST_FRAMES):
            if borrower.connection is None:
                return
            heard = receive(borrower.connection)
            if heard is None:
                return
            frame, descriptors = heard
            close_all(descriptors)
            match frame:
                case Hello() if not borrower.greeted:
                    self._greet(borrower, frame)
                case RequestPages(pages) if borrower.greeted:
                    borrower.asked = min(borrower.asked + pages, MOST_PAGES)
                case Return(numbers) if borrower.greeted and not descriptors:
                    self._book.returned(borrower.number, numbers)
                case _:
                    raise LoanError(f"a borrower says {type(frame).__name__} out of turn")

    def _greet(self, borrower: _Borrower, hello: Hello) -> None:
        if hello != self._hello:
            raise LoanError(
                f"a borrower on GPU {hello.device.hex()} with pages of {hello.page_bytes} bytes"
                f" asks the lender of GPU {self._hello.device.hex()} with {self._hello.page_bytes}"
            )
        borrower.greeted = True

    def _ask_back(self, borrower: _Borrower, wanted: int) -> int:
        """Return how many of the `wanted` pages this borrower is to return; send its new bound."""
        out = self._book.out(borrower.number)
        mine = min(wanted, out)
        keep = out - mine if self._goal else EVERYTHING
        if borrower.connection is None or not borrower.greeted or keep == borrower.keep:
            return mine
        if send(borrower.connection, Revoke(keep)):
            borrower.keep = keep
        return mine

    def _lend(self, borrower: _Borrower) -> None:
        most = min(borrower.asked, MOST_LENT_A_STEP)
        numbers = self._book.lend(borrower.number, most)
        if not numbers or borrower.connection is None:
            return
        sent = False
        descriptors: list[int] = []
        try:
            self._scrub([self._handles[number] for number in numbers])
            for number in numbers:
                descriptors.append(self._driver.export_handle(self._handles[number]))
            sent = send(borrower.connection, Lend(numbers), descriptors)
        finally:
            close_all(descriptors)
            if sent:
                borrower.asked -= len(numbers)
            else:
                self._book.returned(borrower.number, numbers)

    def _scrub(self, handles: list[Handle]) -> None:
        """Zero these pages through a window, so that no process reads the last user's content."""
        pages = range(len(handles))
        self._window.back(pages, self._window.back_zeroed(pages, handles))

    @contextmanager
    def _hanging_up(self, borrower: _Borrower) -> Iterator[None]:
        try:
            yield
        except HungUp:
            self._hang_up(borrower)
        except LoanError as error:
            logger.warning("%s; its pages are back when its process has ended", error)
            self._hang_up(borrower)

    def _hang_up(self, borrower: _Borrower) -> None:
        if borrower.connection is not None:
            borrower.connection.close()
            borrower.connection = None
        borrower.greeted = False
        self._book.left(borrower.number)

    def _forget(self, borrower: _Borrower) -> None:
        self._hang_up(borrower)
        self._book.ended(borrower.number)
        os.close(borrower.process)
        self._borrowers.remove(borrower)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()  # Of a lender that was killed.
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(MOST_BORROWERS)
    except OSError as error:
        listener.close()
        raise LoanError(f"pages cannot be lent at {path}: {error.strerror or error}") from error
    return listener


def _answers(path: Path) -> bool:
    with (
        suppress(ConnectionRefusedError, FileNotFoundError),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe,
    ):
        probe.setblocking(False)
        probe.connect(os.fspath(path))
        return True
    return False
