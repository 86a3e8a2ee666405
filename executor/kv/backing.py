"""Physical memory behind KV blocks: one interface for every kind, host memory, and its release.

`PageBackend` is the interface. `NoPages` is for memory that this process cannot reach.

`HostPages` gives whole pages back to the machine by MADV_DONTNEED; they come back, zeroed, when
they are touched. A page that two blocks share is released once both blocks are held. Bytes count as
returned when they were measured not to be resident, never because a call asked for it. Held memory
may not be part of a huge page, or a touch beside it would bring it back.

`HeldGranules` are the granules that an engine's KV block pool gave up. Their pages go later:

    mapped ── take ──> held, touchable ── unmap ──> held     once no step in flight can touch them
    held ── give_back ──> mapped                             pages first, then blocks

An engine's own pool knows the free blocks of a granule, and removes blocks from its lists.
"""

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from executor.errors import PageReleaseError
from executor.kv.shrink_plan import Granules, GranuleUse

_libc = ctypes.CDLL(None, use_errno=True)
# Linux 5.14; the standard library has no name for it.
_MADV_POPULATE_WRITE = 23
# The two ends of a run that share a page with a neighbour then cost less than 2%.
GRANULE_RUN_BYTES: Final = 256 << 10


class PageBackend(ABC):
    """Interface to the physical pages under the KV blocks of one engine, granule by granule.

    Callers serialise: no step that could touch a granule is in flight while it is released.
    `always_restores`: `restore` cannot fail for want of memory. `bytes_total`: size of the KV
    memory.
    """

    always_restores = True
    bytes_total: int

    @property
    @abstractmethod
    def bytes_returned(self) -> int:
        """Bytes of KV memory whose physical pages are confirmed to be given back now."""

    @property
    @abstractmethod
    def released(self) -> Collection[int]:
        """Granules without pages; some from the start if memory was short."""

    @property
    def kept(self) -> int:
        """Pages that this process holds without a mapping, counted in granules, rounded up."""
        return 0

    @property
    def owed(self) -> int:
        """Borrowed granules that the owners of their pages want back."""
        return 0

    def borrowed(self, granule: int) -> bool:
        """Return True if a granule lies on a page of another process."""
        return False

    @abstractmethod
    def release(self, granules: Collection[int]) -> None:
        """Give back the pages that lie wholly inside released granules, these included."""

    @abstractmethod
    def restore(self, granules: Collection[int]) -> None:
        """Put zeroed pages under these granules again, at the latest on first touch.

        Raises DeviceMemoryShort, and changes nothing then, unless `always_restores`.
        """

    def ready(self, granules: Sequence[int]) -> int:
        """Return how many of these released granules, in order, could be restored now."""
        return len(granules)

    def recall(self, granules: int) -> None:  # noqa: B027 -- most lend nothing
        """Ask the borrowers of this process's pages for this many granules; 0 withdraws that."""

    def poll(self) -> bool:
        """Exchange messages with the processes that share pages, and lend them some; never wait.

        Returns True if there is more to lend to a connected borrower. Raises LoanError,
        DeviceError or RankError.
        """
        return False

    @property
    def processes(self) -> Collection[int]:
        """Ids of the other processes that the memory lies in; empty for memory of this one."""
        return ()

    @property
    def settled(self) -> bool:
        """True if all earlier calls were carried out wherever the memory lies."""
        return True

    def drain(self) -> Sequence[Any]:
        """Return the operations that the engine's next step carries to its ranks, and forget them.

        They are picklable; empty for memory of this process.
        """
        return ()


class NoPages(PageBackend):
    """Backend of KV memory that this process cannot reach: no page is given back."""

    bytes_returned = 0
    released: Collection[int] = ()

    def __init__(self, bytes_total: int) -> None:
        self.bytes_total = bytes_total

    def release(self, granules: Collection[int]) -> None:
        """Do nothing: the pages stay, and `bytes_returned` stays 0."""

    def restore(self, granules: Collection[int]) -> None:
        """Do nothing: the pages never went away."""


for _function, _last in ((_libc.madvise, ctypes.c_int), (_libc.mincore, ctypes.c_void_p)):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, _last)
    _function.restype = ctypes.c_int


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Range of bytes [start, end) in this process's address space."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of bytes in the range."""
        return self.end - self.start

    def whole_pages(self) -> "Range":
        """Return the part of the range that consists of whole memory pages; it may be empty."""
        start = -(-self.start // mmap.PAGESIZE) * mmap.PAGESIZE
        return Range(start, max(start, self.end // mmap.PAGESIZE * mmap.PAGESIZE))


def coalesce(ranges: Iterable[Range]) -> list[Range]:
    """Return the bytes of these ranges in the fewest ranges, ascending."""
    merged: list[Range] = []
    for piece in sorted(ranges):
        if merged and piece.start <= merged[-1].end:
            merged[-1] = Range(merged[-1].start, max(merged[-1].end, piece.end))
        else:
            merged.append(piece)
    return merged


def discard(pages: Range) -> None:
    """Give these whole pages back to the kernel; they read as zeros when touched again.

    Raises PageReleaseError if the kernel refuses, as it does for locked memory.
    """
    if pages.size and _libc.madvise(pages.start, pages.size, mmap.MADV_DONTNEED):
        reason = os.strerror(ctypes.get_errno())
        raise PageReleaseError(
            f"the kernel keeps {pages.size} bytes of KV cache: {reason}; start the guest without"
            " locked memory"
        )


def use_huge_pages(pages: Range) -> None:
    """Put huge pages under memory whose content is not needed; it reads as zeros then.

    Giving back and touching again cost a tenth of what small pages do. Best effort: without free
    huge pages, small ones remain.
    """
    if pages.size and not _libc.madvise(pages.start, pages.size, mmap.MADV_HUGEPAGE):
        _libc.madvise(pages.start, pages.size, mmap.MADV_DONTNEED)
        _libc.madvise(pages.start, pages.size, _MADV_POPULATE_WRITE)


def allow_huge_pages(pages: Range, *, allowed: bool) -> None:
    """Allow or forbid the kernel to make these pages part of a huge page.

    A touch anywhere in a huge page brings all of it into memory. Best effort, like
    `use_huge_pages`.
    """
    if pages.size:
        advice = mmap.MADV_HUGEPAGE if allowed else mmap.MADV_NOHUGEPAGE
        _libc.madvise(pages.start, pages.size, advice)


def resident_bytes(pages: Range) -> int:
    """Return how many bytes of these whole pages are in memory. Raises PageReleaseError."""
    if not pages.size:
        return 0
    present = ctypes.create_string_buffer(pages.size // mmap.PAGESIZE)
    if _libc.mincore(pages.start, pages.size, present):
        reason = os.strerror(ctypes.get_errno())
        raise PageReleaseError(f"resident memory of the KV cache cannot be measured: {reason}")
    # Only the lowest bit of each byte has a meaning, and Linux leaves the others zero.
    return present.raw.count(b"\1") * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Extent:
    """Place of one layer's part of all blocks: `block_bytes` at `base + b * stride` for block b."""

    base: int
    stride: int
    block_bytes: int

    def ranges(self, blocks: range) -> Iterator[Range]:
        """Yield the address ranges of a run of blocks."""
        if self.stride == self.block_bytes:
            yield Range(
                self.base + blocks.start * self.stride, self.base + blocks.stop * self.stride
            )
            return
        for block in blocks:
            start = self.base + block * self.stride
            yield Range(start, start + self.block_bytes)


class HostPages(PageBackend):
    """PageBackend over anonymous memory of this process."""

    def __init__(self, extents: Sequence[Extent], granules: Granules, bytes_total: int) -> None:
        self.extents = extents
        self._granules = granules
        self._held: set[int] = set()
        self._returned: dict[range, int] = {}
        self.bytes_total = bytes_total

    @property
    def bytes_returned(self) -> int:
        return sum(self._returned.values())

    @property
    def released(self) -> Collection[int]:
        return self._held

    def release(self, granules: Collection[int]) -> None:
        """Discard the pages inside runs of released granules, and measure what was freed.

        Runs that did not change are left alone. Raises PageReleaseError.
        """
        self._held.update(granules)
        self._measure_new_runs()

    def restore(self, granules: Collection[int]) -> None:
        """Count these granules' pages as present again: the kernel maps zeroed ones on touch.

        Nothing is measured, since a host calls this inside an allocation. Pages that were not gone
        when a run was measured are subtracted from the rest of the run, so that too much is never
        claimed.
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
        whole = coalesce(piece for extent in self.extents for piece in extent.ranges(blocks))
        return [piece.whole_pages() for piece in whole]


def runs(numbers: Iterable[int]) -> list[range]:
    """Return the maximal runs of consecutive numbers, ascending."""
    found: list[range] = []
    for number in sorted(numbers):
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def granule_blocks(extents: Sequence[Extent]) -> int:
    """Return the blocks of the smallest granule whose runs of memory have GRANULE_RUN_BYTES."""
    return blocks_of_runs(extents, GRANULE_RUN_BYTES)


def blocks_of_runs(extents: Sequence[Extent], run_bytes: int) -> int:
    """Return the fewest neighbouring blocks whose runs of memory have `run_bytes` on average.

    What is lost at the ends of runs then has the same share, whatever the sizes of layers.
    """
    runs = of_two_blocks(extents)
    return max(1, -(-run_bytes * 2 * len(runs) // max(2, sum(run.size for run in runs))))


def of_two_blocks(extents: Sequence[Extent]) -> list[Range]:
    """Return the merged ranges of memory of blocks 0 and 1, over all layers."""
    return coalesce(piece for extent in extents for piece in extent.ranges(range(2)))


class HeldGranules(ABC):
    """Balloon over an engine's KV block pool: the granules (runs of blocks) taken out of it.

    It returns their pages to the backend. A `fence` is a number of engine steps. Subclasses take
    blocks out of the engine's own pool.
    """

    def __init__(self, granules: Granules, pages: PageBackend) -> None:
        """Create the balloon, and hold the granules that have no pages from the start.

        It calls `_take_out`, so a subclass prepares that first.
        """
        self.granules = granules
        self.pages = pages
        self.held: set[int] = set()
        self._touchable: dict[int, int] = {}
        self._take_out(pages.released)
        self.held.update(pages.released)

    @property
    def granule_bytes(self) -> int:
        """Bytes of KV memory in a whole granule."""
        return self.pages.bytes_total // self.granules.blocks * self.granules.granule_blocks

    @property
    def unmapped(self) -> bool:
        """True if the pages of all held granules were given back."""
        return not self._touchable

    @property
    def owed(self) -> int:
        """Borrowed granules that their owner wants back, less those whose return has begun."""
        owed = self.pages.owed
        return owed and max(0, owed - sum(map(self.pages.borrowed, self._touchable)))

    def take(self, granules: Collection[int], fence: int) -> int:
        """Take those granules whose blocks are all free out of the pool; return their number.

        Their pages stay until `unmap` is told that step `fence` is done: it may read or write them.
        """
        taken = self._wholly_free(granules)
        self._take_out(taken)
        for granule in taken:
            self.held.add(granule)
            self._touchable[granule] = fence
        return len(taken)

    def unmap(self, steps_done: int) -> None:
        """Give back the pages of held granules that no step after `steps_done` can touch."""
        due = [granule for granule, fence in self._touchable.items() if fence <= steps_done]
        if due:
            self.pages.release(due)
            for granule in due:
                del self._touchable[granule]

    def give_back(self, granules: Collection[int]) -> None:
        """Map held granules again: restore their pages, then put their blocks into the pool."""
        self.pages.restore(granules)
        self._put_in(granules)
        for granule in granules:
            self.held.remove(granule)
            self._touchable.pop(granule, None)

    @property
    @abstractmethod
    def capacity_blocks(self) -> int:
        """Most blocks that requests can have now, all together."""

    @abstractmethod
    def uses(self) -> Iterable[GranuleUse]:
        """Return the number of used and cached blocks of each mapped granule."""

    @abstractmethod
    def _wholly_free(self, granules: Collection[int]) -> list[int]:
        """Return those of the granules that are mapped and whose blocks are all free."""

    @abstractmethod
    def _take_out(self, granules: Collection[int]) -> None:
        """Remove the free blocks of these granules from the engine's pool."""

    @abstractmethod
    def _put_in(self, granules: Collection[int]) -> None:
        """Put the blocks of these granules back into the engine's pool."""
