"""KV memory on the host: pages go by MADV_DONTNEED and come back, zeroed, when they are touched.

A page that two blocks share is given back when both are held. What counts as returned is what was
measured not to be resident, never what was asked for. What is held may not be part of a huge page,
or a touch beside it would bring it back.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from executor.granules import Granules
from executor.pages import OwnPages
from executor.resident import Range, allow_huge_pages, coalesce, discard, resident_bytes


@dataclass(frozen=True, slots=True)
class Extent:
    """One layer's part of all blocks: block b is the `block_bytes` at `base + b * stride`."""

    base: int
    stride: int
    block_bytes: int

    def ranges(self, blocks: range) -> Iterator[Range]:
        """The bytes of a run of blocks."""
        if self.stride == self.block_bytes:
            yield Range(
                self.base + blocks.start * self.stride, self.base + blocks.stop * self.stride
            )
            return
        for block in blocks:
            start = self.base + block * self.stride
            yield Range(start, start + self.block_bytes)


class HostPages(OwnPages):
    """PageBackend over anonymous memory of this process."""

    def __init__(self, extents: Sequence[Extent], granules: Granules, bytes_total: int) -> None:
        self._extents = extents
        self._granules = granules
        self._held: set[int] = set()
        self._returned: dict[range, int] = {}
        self.bytes_total = bytes_total

    @property
    def bytes_returned(self) -> int:
        """Bytes measured to be gone."""
        return sum(self._returned.values())

    @property
    def released(self) -> Collection[int]:
        """Granules that were given back."""
        return self._held

    def release(self, granules: Collection[int]) -> None:
        """Discard the pages inside the runs of held granules that grew.

        Raises PageReleaseError.
        """
        self._held.update(granules)
        self._measure_new_runs()

    def restore(self, granules: Collection[int]) -> None:
        """Stop counting on these granules' pages: the kernel puts zeroed ones where it must.

        Takes no look at memory: a host does this inside an allocation. What was not gone when a run
        was measured is missing from all that is left of it, so that too much is never claimed.
        """
        self._held.difference_update(granules)
        known, self._returned = self._returned, {}
        lost = {run: self._size(run) - gone for run, gone in known.items()}
        for run in runs(self._held):
            whole = next(old for old in known if old.start <= run.start and run.stop <= old.stop)
            left = known[whole] if run == whole else self._size(run) - lost[whole]
            self._returned[run] = max(0, left)
        for run in runs(granules):
            for piece in self._pages(run):
                allow_huge_pages(piece, allowed=True)

    def _measure_new_runs(self) -> None:
        known, self._returned = self._returned, {}
        for run in runs(self._held):
            gone = known.get(run)
            self._returned[run] = self._discarded(run) if gone is None else gone

    def _discarded(self, run: range) -> int:
        returned = 0
        for piece in self._pages(run):
            allow_huge_pages(piece, allowed=False)
            discard(piece)
            returned += piece.size - resident_bytes(piece)
        return returned

    def _size(self, run: range) -> int:
        return sum(piece.size for piece in self._pages(run))

    def _pages(self, run: range) -> list[Range]:
        first, last = self._granules.blocks_of(run.start), self._granules.blocks_of(run.stop - 1)
        blocks = range(first.start, last.stop)
        whole = coalesce(piece for extent in self._extents for piece in extent.ranges(blocks))
        return [piece.whole_pages() for piece in whole]


def runs(numbers: Iterable[int]) -> list[range]:
    """The maximal runs of consecutive numbers."""
    found: list[range] = []
    for number in sorted(numbers):
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
