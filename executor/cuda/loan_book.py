"""Which pages are in stock, which are lent to whom, and how many are wanted back: a core.

    stock ── lend ──> out ── returned ──> stock
    out ── its borrower broke the rules, or hung up ──> stranded ── its process ended ──> stock

Until a borrower says that it unmapped a page, or its process is known to have ended, the page may
be written to at any time: nobody else gets it.
"""

from collections.abc import Collection, Iterable
from typing import Final

from executor.errors import LoanError

_NOBODY: Final = -1


class LoanBook:
    """Pages by number; borrowers by a number of the caller's that is never used twice."""

    def __init__(self, reserve: int) -> None:
        """`reserve`: how many pages in stock are never lent."""
        self._reserve = reserve
        self._stock: list[int] = []
        self._out: dict[int, int] = {}
        self._stranded: dict[int, int] = {}

    @property
    def in_stock(self) -> int:
        """Pages that nobody uses."""
        return len(self._stock)

    @property
    def lendable(self) -> int:
        """Pages in stock beyond the reserve."""
        return max(0, len(self._stock) - self._reserve)

    @property
    def stranded(self) -> int:
        """Pages of borrowers that are not dealt with any more and still live."""
        return len(self._stranded)

    def out(self, borrower: int) -> int:
        """Pages that a borrower has."""
        return sum(who == borrower for who in self._out.values())

    def put(self, numbers: Iterable[int]) -> None:
        """Add pages to the stock."""
        self._stock += numbers

    def take(self, most: int) -> list[int]:
        """Remove up to so many pages from the stock, the reserve included: they are the owner's."""
        first = max(0, len(self._stock) - most)
        taken = self._stock[first:]
        del self._stock[first:]
        return taken

    def lend(self, borrower: int, most: int) -> tuple[int, ...]:
        """Lend up to so many pages; the reserve stays."""
        lent = self.take(min(most, self.lendable))
        self._out.update(dict.fromkeys(lent, borrower))
        return tuple(lent)

    def returned(self, borrower: int, numbers: Collection[int]) -> None:
        """A borrower gave pages back. Raises LoanError for any it does not have: none counts then.

        The borrower is not to be believed any more after that.
        """
        foreign = [number for number in numbers if self._out.get(number, _NOBODY) != borrower]
        if foreign:
            raise LoanError(f"a borrower returns page {foreign[0]}, which was not lent to it")
        for number in numbers:
            del self._out[number]
        self._stock += numbers

    def left(self, borrower: int) -> None:
        """A borrower is not dealt with any more; what it has is stranded."""
        for number in [number for number, who in self._out.items() if who == borrower]:
            self._stranded[number] = self._out.pop(number)

    def ended(self, borrower: int) -> int:
        """A borrower's process has ended: what was stranded with it is in stock again."""
        self.left(borrower)
        back = [number for number, who in self._stranded.items() if who == borrower]
        for number in back:
            del self._stranded[number]
        self._stock += back
        return len(back)
