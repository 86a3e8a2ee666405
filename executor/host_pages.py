"""KV memory on the host: pages go by MADV_DONTNEED and come back, zeroed, when they are touched.

A page that two blocks share is given back when both are held. What counts as returned is what was
measured not to be resident, never what was asked for.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from executor.granules import Granules
from executor.resident import Range, coalesce, discard, resident_bytes


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


class HostPages:
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

    def release(self, granules: Collection[int]) -> None:
        """Discard the pages inside the runs of held granules that grew.

        Raises PageReleaseError.
        """
        self._held.update(granules)
        self._measure_new_runs(discarding=True)

    def restore(self, granules: Collection[int]) -> None:
        """Stop counting on these granules' pages: the kernel puts zeroed ones where it must."""
        self._held.difference_update(granules)
        self._measure_new_runs(discarding=False)

    def _measure_new_runs(self, *, discarding: bool) -> None:
        known, self._returned = self._returned, {}
        for run in runs(self._held):
            gone = known.get(run)
            self._returned[run] = self._returned_by(run, discarding) if gone is None else gone

    def _returned_by(self, run: range, discarding: bool) -> int:
        returned = 0
        for piece in self._pages(run):
            if discarding:
                discard(piece)
            returned += piece.size - resident_bytes(piece)
        return returned

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
