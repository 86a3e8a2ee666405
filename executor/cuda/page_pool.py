"""Sources of a GPU's physical pages: the driver, and another process that lends its own.

`PagePool` creates pages through the driver and keeps some spare. `PageClient` borrows pages of
another process of the same GPU, until it wants them back.
"""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Final

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
    receive,
    send,
)
from executor.errors import DeviceError, DeviceMemoryShort, LoanError

MOST_FRAMES: Final = 8


class PageSource(ABC):
    """Supplier of a GPU's physical pages; a page is its taker's alone until it is given back.

    `foreign`: pages that this process has and that belong to another one. `wanted`: number of
    borrowed pages that their owner wants back; give as many.
    """

    @property
    def wanted(self) -> int:
        return 0

    @property
    def foreign(self) -> Collection[Handle]:
        return ()

    @property
    @abstractmethod
    def idle(self) -> int:
        """Number of pages that this process holds without a mapping: kept, not returned."""

    @property
    @abstractmethod
    def available(self) -> int:
        """Number of pages that `take` could return now."""

    @abstractmethod
    def take(self, count: int) -> list[Handle]:
        """Return the handles of `count` pages, their content undefined.

        Raises DeviceMemoryShort, and changes nothing then.
        """

    @abstractmethod
    def give(self, handles: Collection[Handle]) -> None:
        """Accept pages back that this process has unmapped."""

    def recall(self, count: int) -> None:  # noqa: B027 -- most lend nothing
        """Ask borrowers for their pages until `count` are in stock; 0 withdraws that.

        A source that lends nothing does nothing.
        """

    def step(self) -> bool:
        """Handle the messages of processes that share pages, without waiting.

        Returns True if there is more to lend to a borrower. Raises LoanError or DeviceError.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Release every page that is not mapped, and disconnect from other processes."""


class PagePool(PageSource):
    """Source that creates pages through the GPU's driver and keeps up to `most_spare` given ones.

    Creating a page costs a hundred times as much as mapping one. Only pages beyond `most_spare`
    return to the device. Other processes share with this one through the driver alone: they can
    create pages that this one returned, and the other way round, unless another process on the
    device is faster.
    """

    def __init__(
        self, driver: Driver, page_bytes: int, *, most_spare: int = 0, headroom_bytes: int = 0
    ) -> None:
        """Create an empty pool.

        headroom_bytes: the device's memory that stays free in any case.
        """
        self._driver = driver
        self._page_bytes = page_bytes
        self._most_spare = most_spare
        self._headroom_bytes = headroom_bytes
        self._spare: list[Handle] = []

    @property
    def idle(self) -> int:
        return len(self._spare)

    @property
    def available(self) -> int:
        """Number of pages kept, plus those that fit the free memory beyond the headroom."""
        free = self._driver.free_bytes() - self._headroom_bytes
        return len(self._spare) + max(0, free // self._page_bytes)

    def close(self) -> None:
        self._release_down_to(0)

    def take(self, count: int) -> list[Handle]:
        """Return the handles of `count` pages: kept ones first, then new ones.

        Raises DeviceMemoryShort, and changes nothing then.
        """
        kept = min(count, len(self._spare))
        created = self._create(count - kept)
        taken = self._spare[len(self._spare) - kept :]
        del self._spare[len(self._spare) - kept :]
        return taken + created

    def give(self, handles: Collection[Handle]) -> None:
        """Keep the pages as spare up to `most_spare`, and release the others to the device."""
        self._spare += handles
        self._release_down_to(self._most_spare)

    def _release_down_to(self, spare: int) -> None:
        while len(self._spare) > spare:
            self._driver.release(self._spare[-1])
            self._spare.pop()

    def _create(self, count: int) -> list[Handle]:
        if not count:
            return []
        wanted = count * self._page_bytes
        free = self._driver.free_bytes()
        if free - wanted < self._headroom_bytes:
            raise DeviceMemoryShort(
                f"{wanted} bytes of KV pages wanted, {free} free on the GPU, of which"
                f" {self._headroom_bytes} stay free; it may come back"
            )
        created: list[Handle] = []
        try:
            for _ in range(count):
                created.append(self._driver.create(self._page_bytes))
        except BaseException:
            for handle in created:
                self._driver.release(handle)
            raise
        return created


class PageClient(PageSource):
    """Source of a guest: pages borrowed from a page server first, then its own.

    One thread calls it. A borrowed page that is given goes back to its lender. When the lender
    ends, pages that are mapped stay as they are, and no others come.
    """

    def __init__(self, driver: Driver, page_bytes: int, path: Path, own: PagePool) -> None:
        """Connect to the lender's socket at `path` and ask for pages.

        own: source of further pages. Raises LoanError if no lender is at `path`.
        """
        self._driver = driver
        self._own = own
        self._numbers: dict[Handle, int] = {}
        self._stock: list[Handle] = []
        self._unsaid: list[int] = []
        self._unasked = MOST_PAGES
        self._connection: socket.socket | None = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._keep = EVERYTHING
        try:
            self._connection.connect(os.fspath(path))
            send(self._connection, Hello(driver.device, page_bytes))
        except (OSError, HungUp) as error:
            self._connection.close()
            raise LoanError(f"nobody lends pages at {path}: start the host first") from error
        self._ask()

    @property
    def idle(self) -> int:
        """Number of borrowed and own pages without a mapping."""
        return self.unmapped + self._own.idle

    @property
    def unmapped(self) -> int:
        """Number of borrowed pages without a mapping."""
        return len(self._stock)

    @property
    def borrowed(self) -> int:
        """Number of the lender's pages that this process has, mapped or not."""
        return len(self._numbers)

    @property
    def wanted(self) -> int:
        return max(0, self.borrowed - self._keep)

    @property
    def available(self) -> int:
        """Number of borrowed pages without a mapping, and of pages that `own` could return."""
        return self.unmapped + self._own.available

    @property
    def foreign(self) -> Collection[Handle]:
        return self._numbers.keys()

    def take(self, count: int) -> list[Handle]:
        """Return the handles of `count` pages: borrowed ones first, then own ones.

        Raises DeviceMemoryShort, and changes nothing then.
        """
        borrowed = min(count, len(self._stock))
        own = self._own.take(count - borrowed)
        taken = self._stock[len(self._stock) - borrowed :]
        del self._stock[len(self._stock) - borrowed :]
        return taken + own

    def give(self, handles: Collection[Handle]) -> None:
        """Return borrowed pages to their lender, and the others to the own source."""
        self._own.give([handle for handle in handles if handle not in self._numbers])
        self._give_back([handle for handle in handles if handle in self._numbers])

    def step(self) -> bool:
        """Handle the lender's messages and send returns, without waiting; return False.

        Raises LoanError if the lender breaks the rules.
        """
        self._tell()
        self._hear()
        self._ask()
        return False

    def close(self) -> None:
        """Close the connection, and release the pages without a mapping."""
        self._hang_up()
        self._own.close()

    def _hear(self) -> None:
        for _ in range(MOST_FRAMES):
            try:
                heard = receive(self._connection) if self._connection is not None else None
            except HungUp:
                self._hang_up()
                return
            if heard is None:
                return
            frame, descriptors = heard
            try:
                self._obey(frame, descriptors)
            finally:
                close_all(descriptors)

    def _hang_up(self) -> None:
        for handle in self._stock:
            self._driver.release(handle)
            del self._numbers[handle]
        self._stock.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _obey(self, frame: object, descriptors: list[int]) -> None:
        match frame:
            case Lend(numbers) if len(numbers) == len(descriptors):
                self._import(numbers, descriptors)
            case Revoke(keep):
                self._keep = keep
            case _:
                raise LoanError(
                    f"a lender says {type(frame).__name__} with {len(descriptors)} descriptors"
                )
        if self.wanted:
            self._give_back(self._stock[-self.wanted :])

    def _import(self, numbers: tuple[int, ...], descriptors: list[int]) -> None:
        imported = 0
        self._unasked += len(numbers)
        try:
            for number, descriptor in zip(numbers, descriptors, strict=True):
                handle = self._driver.import_handle(descriptor)
                self._numbers[handle] = number
                self._stock.append(handle)
                imported += 1
        except DeviceError:
            self._unsaid += numbers[imported:]
            self._tell()
            raise

    def _give_back(self, handles: list[Handle]) -> None:
        for handle in handles:
            self._driver.release(handle)
            self._unsaid.append(self._numbers.pop(handle))
            if handle in self._stock:
                self._stock.remove(handle)
        self._tell()

    def _tell(self) -> None:
        """Send the numbers of returned pages to the lender, as far as the socket takes them now."""
        while self._unsaid and self._connection is not None:
            numbers = tuple(self._unsaid[:MOST_PAGES])
            try:
                if not send(self._connection, Return(numbers)):
                    return
            except HungUp:
                self._hang_up()
                return
            del self._unsaid[: len(numbers)]

    def _ask(self) -> None:
        if not self._unasked or self._connection is None:
            return
        try:
            if send(self._connection, RequestPages(self._unasked)):
                self._unasked = 0
        except HungUp:
            self._hang_up()
