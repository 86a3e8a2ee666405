"""Memory of this process: give whole pages back to the machine, and count those that are there."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

from executor.errors import PageReleaseError

_libc = ctypes.CDLL(None, use_errno=True)
for _function, _last in ((_libc.madvise, ctypes.c_int), (_libc.mincore, ctypes.c_void_p)):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, _last)
    _function.restype = ctypes.c_int
# Linux 5.14; the standard library has no name for it.
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Bytes [start, end) of this process's address space."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes in it."""
        return self.end - self.start

    def whole_pages(self) -> "Range":
        """The part that consists of whole pages; it may be empty."""
        start = -(-self.start // mmap.PAGESIZE) * mmap.PAGESIZE
        return Range(start, max(start, self.end // mmap.PAGESIZE * mmap.PAGESIZE))


def coalesce(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in the fewest ranges."""
    merged: list[Range] = []
    for piece in sorted(ranges):
        if merged and piece.start <= merged[-1].end:
            merged[-1] = Range(merged[-1].start, max(merged[-1].end, piece.end))
        else:
            merged.append(piece)
    return merged


def discard(pages: Range) -> None:
    """Give these whole pages back; they read as zeros when touched again.

    Raises PageReleaseError when the kernel refuses, as it does for locked memory.
    """
    if pages.size and _libc.madvise(pages.start, pages.size, mmap.MADV_DONTNEED):
        reason = os.strerror(ctypes.get_errno())
        raise PageReleaseError(
            f"the kernel keeps {pages.size} bytes of KV cache: {reason}; start the guest without"
            " locked memory"
        )


def use_huge_pages(pages: Range) -> None:
    """Ask for huge pages under memory whose content is of no account; it reads as zeros then.

    Giving back and touching again cost a tenth of what small pages do. A wish: a kernel that has
    none leaves the pages small.
    """
    if pages.size and not _libc.madvise(pages.start, pages.size, mmap.MADV_HUGEPAGE):
        _libc.madvise(pages.start, pages.size, mmap.MADV_DONTNEED)
        _libc.madvise(pages.start, pages.size, _MADV_POPULATE_WRITE)


def allow_huge_pages(pages: Range, *, allowed: bool) -> None:
    """Whether these may become part of a huge page, of which a touch anywhere brings all.

    A wish, as above.
    """
    if pages.size:
        advice = mmap.MADV_HUGEPAGE if allowed else mmap.MADV_NOHUGEPAGE
        _libc.madvise(pages.start, pages.size, advice)


def resident_bytes(pages: Range) -> int:
    """How many bytes of these whole pages are in memory."""
    if not pages.size:
        return 0
    present = ctypes.create_string_buffer(pages.size // mmap.PAGESIZE)
    if _libc.mincore(pages.start, pages.size, present):
        reason = os.strerror(ctypes.get_errno())
        raise PageReleaseError(f"resident memory of the KV cache cannot be measured: {reason}")
    # Only the lowest bit of each byte has a meaning, and Linux leaves the others zero.
    return present.raw.count(b"\1") * mmap.PAGESIZE
