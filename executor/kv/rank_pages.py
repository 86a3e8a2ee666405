"""KV pages of an engine whose memory lies in other processes, its ranks: decided once, for all.

The engine's scheduler decides, and each rank has the memory under its own part of every block:

    scheduler: RankPages ── numbered operations, in the next step ──> rank: RankPager, in order,
    scheduler: RankPages <── report, in memory that both map ──────── before the step's own work

A call of RankPages moves nothing: its operation travels with the next step, an empty one too. So a
block that is handed out again has its pages before the step that uses it, on every rank. Operations
that may fail for want of memory go first: `ready` has every rank map granules, and counts those
that all of them reported.

A report is a `RankReport` in a memfd of the rank, named rose-rank-<rank>. The scheduler opens it
through /proc/<pid>/fd of processes that it knows, so it needs no name, and ends with its rank. The
figures are the worst of all ranks. An operation counts as returned memory once it is reported, and
as memory in use from the moment at which it was decided: what is unread, late or torn counts
against a guest.
"""

import math
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from typing import Final, NamedTuple, Self

import numpy as np

from executor.control_page.seqlock_records import (
    PageRecord,
    PageSection,
    record,
    section_bytes,
)
from executor.errors import DeviceMemoryShort, PageUnreadable, RankError
from executor.kv.backing import PageBackend
from executor.kv.shrink_plan import Granules

MEMFD: Final = "rose-rank-"
FAILURE_BYTES: Final = 160


class RankCall(IntEnum):
    """Kind of an operation: RankPages' call of the same name; FETCH maps what may be missing."""

    RELEASE = 0
    RESTORE = 1
    FETCH = 2
    RECALL = 3


class Operation(NamedTuple):
    """Operation that each rank carries out once, in the order of `number`, counted from 1.

    granules: those to move. wanted: granules to ask borrowers for, of a RECALL.
    """

    number: int
    kind: RankCall
    granules: tuple[int, ...] = ()
    wanted: int = 0


@record(text_bytes=FAILURE_BYTES)
class RankReport(PageRecord):
    """Report of one of `ranks` ranks on its KV memory, after operation number `done`.

    `pid`: process of the rank; one that it forks has the report open, too. `blocks`,
    `granule_blocks`: the granules of all ranks. `always_restores`, `bytes_total`, `bytes_returned`,
    `kept`, `owed`: as PageBackend has them. `mapped`: granules that had pages at the start, the
    lowest. `fetched`: granules of the last FETCH that have pages, its first.
    `lends`: True if there is more to lend to a borrower. `borrowed_crc`: CRC-32 of the bits behind
    the record, one for each granule that lies on a page of another process. `failure`: error that
    ended the rank's work on pages, empty for none.
    """

    pid: int = 0
    rank: int = 0
    ranks: int = 0
    blocks: int = 0
    granule_blocks: int = 0
    bytes_total: int = 0
    mapped: int = 0
    always_restores: bool = True
    done: int = 0
    bytes_returned: int = 0
    kept: int = 0
    owed: int = 0
    fetched: int = 0
    lends: bool = False
    borrowed_crc: int = 0
    failure: str = ""


class RankPager:
    """Pager of one rank: carries out operations on the rank's own pages, and reports.

    Only the thread that runs the rank's steps may call it.
    """

    def __init__(self, pages: PageBackend, granules: Granules, rank: int, ranks: int) -> None:
        """Take over the pages, and publish a first report. Raises OSError without a memfd."""
        self.pages = pages
        bits = -(-granules.count // 8)
        first = section_bytes(RankReport)
        descriptor = os.memfd_create(f"{MEMFD}{rank}")
        try:
            os.truncate(descriptor, first + bits)
            # The mapping keeps a descriptor of its own, by which the scheduler finds the report.
            view = memoryview(mmap.mmap(descriptor, first + bits))
        finally:
            os.close(descriptor)
        self._section = PageSection(view[:first], 0, RankReport)
        self._bits = view[first:]
        self._report = RankReport(
            os.getpid(),
            rank,
            ranks,
            granules.blocks,
            granules.granule_blocks,
            pages.bytes_total,
            granules.count - len(pages.released),
            pages.always_restores,
        )
        self._borrowed = np.zeros(granules.count, np.bool_)
        self._publish(self._measured(range(granules.count)))

    def carry_out(self, operations: Sequence[Operation]) -> None:
        """Carry out a step's operations before its work, and publish a report if it changed.

        Call it for each step, also without any: pages are lent and borrowed meanwhile. An error is
        reported, and ends the rank's work on pages; nothing is raised.
        """
        pages, before = self.pages, self._report
        if before.failure or (pages.always_restores and not operations):
            return
        try:
            for operation in operations:
                self._obey(operation)
            with suppress(DeviceMemoryShort):
                # If the device has no room to import them, lent pages go back, and come again.
                self._report = replace(self._report, lends=pages.poll())
            moved = {granule for operation in operations for granule in operation.granules}
            self._report = self._measured(moved)
        except Exception as error:  # noqa: BLE001 -- the scheduler decides what an error ends
            self._report = replace(self._report, failure=str(error) or type(error).__name__)
        if self._report != before:
            self._publish(self._report)

    def _obey(self, operation: Operation) -> None:
        if operation.number != self._report.done + 1:
            raise RankError(f"operation {operation.number} follows {self._report.done}")
        pages, granules = self.pages, operation.granules
        fetched = self._report.fetched
        match operation.kind:
            case RankCall.RELEASE:
                pages.release(granules)
            case RankCall.RESTORE:
                pages.restore(granules)
            case RankCall.FETCH:
                fetched = self._fetch(granules)
            case RankCall.RECALL:
                pages.recall(operation.wanted)
        self._report = replace(self._report, done=operation.number, fetched=fetched)

    def _fetch(self, granules: Sequence[int]) -> int:
        missing = [granule for granule in granules if granule in self.pages.released]
        with suppress(DeviceMemoryShort):
            self.pages.restore(missing[: self.pages.ready(missing)])
        there = (granule not in self.pages.released for granule in granules)
        return next((count for count, mapped in enumerate(there) if not mapped), len(granules))

    def _measured(self, moved: Collection[int]) -> RankReport:
        """Return the report of now; `moved`: granules that may be borrowed since, or no more."""
        pages, held = self.pages, self.pages.released
        for granule in moved:
            self._borrowed[granule] = granule not in held and pages.borrowed(granule)
        bits = np.packbits(self._borrowed).tobytes()
        self._bits[:] = bits
        return replace(
            self._report,
            bytes_returned=max(0, pages.bytes_returned),
            kept=pages.kept,
            owed=pages.owed,
            borrowed_crc=zlib.crc32(bits),
        )

    def _publish(self, report: RankReport) -> None:
        self._report = report
        self._section.write(report)


class CommonGranule:
    """Agreement of all ranks on the blocks of a granule; each rank takes part exactly once."""

    def __init__(self, gather: Callable[[int], Iterable[int]]) -> None:
        """Prepare to agree; gather: takes this rank's value, returns those of all ranks."""
        self._gather = gather
        self._took_part = False

    def __call__(self, own: int) -> int:
        """Return the least common multiple of all ranks' blocks; 0 if any rank has 0."""
        self._took_part = True
        return math.lcm(*self._gather(own))

    def close(self) -> None:
        """Take part with 0 if this rank failed before; the others would wait for it."""
        if not self._took_part:
            self(0)


# The fields of a RankReport that change are its last ones, and each is a letter of the format.
_Figures = tuple[int, int, int, int, int, bool, int, bytes]
_CHANGING_FIELD: Final = RankReport.NAMES.index("done")
_CHANGING: Final = struct.Struct("=" + RankReport.LAYOUT.format[1 + _CHANGING_FIELD :])
_CHANGING_AT: Final = RankReport.LAYOUT.size - _CHANGING.size


class _Rank:
    """Last whole report of one rank, and the granules that it has borrowed."""

    def __init__(self, descriptor: int) -> None:
        """Map a rank's report. Raises OSError, ValueError or PageUnreadable if there is none."""
        first = section_bytes(RankReport)
        view = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        if len(view) < first:
            raise ValueError("the report is cut short")
        self.section = PageSection(view[:first], 0, RankReport)
        self._bits = view[first:]
        read = self.section.read()
        if read is None:
            raise PageUnreadable("the rank has not reported yet")
        self.first: RankReport = read
        self.sequence = 0
        self.borrowed: frozenset[int] = frozenset()
        self.figures: _Figures = 0, 0, 0, 0, 0, False, -1, b""
        if not self.read():
            raise PageUnreadable("the rank's report is torn")

    def read(self) -> bool:
        """Return True if there is a new report, and read it.

        One that is being written, or stays torn, leaves the last whole one.
        """
        found = self.section.read_after(self.sequence)
        if found is None:
            return False
        crc = self.figures[-2]
        self.sequence = found[0]
        self.figures = figures = _CHANGING.unpack_from(found[1], _CHANGING_AT)
        if figures[-2] != crc:
            self._read_borrowed(figures[-2])
        return True

    def _read_borrowed(self, crc: int) -> None:
        bits = bytes(self._bits)
        # Bits that are being written belong to the next report, which is read then.
        if zlib.crc32(bits) == crc:
            set_bits = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8)))
            self.borrowed = frozenset(set_bits.tolist())


class RankPages(PageBackend):
    """PageBackend over the pages of all ranks of an engine, whose steps carry its operations.

    `drain` returns those that the next step has to carry, and each rank's RankPager carries them
    out. Figures are those of the rank with the worst, as of the last `poll`.
    """

    def __init__(self, ranks: Sequence[_Rank], blocks: int) -> None:
        """Begin with the first reports. Raises RankError if they do not fit together."""
        self._ranks = ranks
        self._least_returned = self._most_kept = self._most_owed = 0
        self._lends = self._failed = False
        first = ranks[0].first
        self.granules = Granules(first.blocks, first.granule_blocks)
        for rank in ranks:
            report = rank.first
            if (report.blocks, report.granule_blocks) != (blocks, first.granule_blocks):
                raise RankError(
                    f"rank {report.rank} has {report.blocks} KV blocks in granules of"
                    f" {report.granule_blocks}, and its engine {blocks} in granules of"
                    f" {first.granule_blocks}"
                )
        self.always_restores = all(rank.first.always_restores for rank in ranks)
        self.bytes_total = max(rank.first.bytes_total for rank in ranks)
        mapped = min(rank.first.mapped for rank in ranks)
        self._granule_bytes = self.bytes_total // blocks * first.granule_blocks
        self._held = set(range(mapped, self.granules.count))
        self._issued = 0
        self._recalled = 0
        self._queue: list[Operation] = []
        self._outstanding: deque[Operation] = deque()
        self._fetching: Operation | None = None
        # Granules in `_held` that every rank has mapped, and those that some may have.
        self._fetched: set[int] = set()
        self._tried: set[int] = set()
        if any(rank.first.mapped != mapped for rank in ranks):
            self._issue(RankCall.RELEASE, self._held)
        self._read()

    @classmethod
    def of_processes(cls, pids: Iterable[int], ranks: int, blocks: int) -> Self:
        """Return the pages of an engine whose `ranks` ranks are among these processes.

        Raises RankError if any of them does not report.
        """
        reporting = (rank for pid in pids for rank in _reporting(pid) if rank.first.pid == pid)
        found = {rank.first.rank: rank for rank in reporting if rank.first.ranks == ranks}
        missing = [str(rank) for rank in range(ranks) if rank not in found]
        if missing:
            raise RankError(f"no report on the KV pages of rank {', '.join(missing)}")
        return cls([found[rank] for rank in range(ranks)], blocks)

    def drain(self) -> Sequence[Operation]:
        operations, self._queue = tuple(self._queue), []
        return operations

    @property
    def processes(self) -> Collection[int]:
        pids = (rank.first.pid for rank in self._ranks)
        return [pid for pid in pids if pid != os.getpid()]

    @property
    def settled(self) -> bool:
        return not self._outstanding

    @property
    def bytes_returned(self) -> int:
        if not self._outstanding:
            return self._least_returned
        coming = sum(len(o.granules) for o in self._outstanding if o.kind in _MAPPING)
        return max(0, self._least_returned - coming * self._granule_bytes)

    @property
    def released(self) -> Collection[int]:
        return self._held

    @property
    def kept(self) -> int:
        going = sum(len(o.granules) for o in self._outstanding if o.kind is RankCall.RELEASE)
        return going + self._most_kept

    @property
    def owed(self) -> int:
        owed = self._most_owed
        going = (o.granules for o in self._outstanding if o.kind is RankCall.RELEASE)
        return owed and max(0, owed - sum(map(self.borrowed, (g for some in going for g in some))))

    def borrowed(self, granule: int) -> bool:
        return any(granule in rank.borrowed for rank in self._ranks)

    def release(self, granules: Collection[int]) -> None:
        self._held.update(granules)
        self._issue(RankCall.RELEASE, self._tried.union(granules))
        self._forget_fetched()

    def restore(self, granules: Collection[int]) -> None:
        """Put pages under these granules before the next step; those that are `ready` alone.

        Raises DeviceMemoryShort for others, unless `always_restores`.
        """
        if self.always_restores and granules:
            self._issue(RankCall.RESTORE, granules)
        elif granules:
            if not self._fetched.issuperset(granules):
                raise DeviceMemoryShort("KV pages are not mapped on every rank yet; they may be")
            self._fetched.difference_update(granules)
            self._tried.difference_update(granules)
        self._held.difference_update(granules)

    def ready(self, granules: Sequence[int]) -> int:
        """Return how many of these granules, in order, every rank has mapped; have them mapped."""
        if self.always_restores:
            return len(granules)
        count = next((n for n, g in enumerate(granules) if g not in self._fetched), len(granules))
        if count < len(granules) and self._fetching is None:
            self._fetching = self._issue(RankCall.FETCH, granules[count:])
            self._tried.update(granules[count:])
        return count

    def recall(self, granules: int) -> None:
        if not granules and self._tried:
            self._issue(RankCall.RELEASE, self._tried)
            self._forget_fetched()
        if granules or self._recalled:
            self._issue(RankCall.RECALL, wanted=granules)
            self._recalled = granules

    def poll(self) -> bool:
        """Read the reports; return True if an operation is under way or more is to be lent.

        Raises RankError if a rank failed.
        """
        self._read()
        for number, rank in enumerate(self._ranks if self._failed else ()):
            report = rank.section.peek()
            if report is not None and report.failure:
                raise RankError(f"rank {number}: {report.failure}")
        return bool(self._outstanding) or self._lends

    def _issue(self, kind: RankCall, granules: Collection[int] = (), wanted: int = 0) -> Operation:
        self._issued += 1
        operation = Operation(self._issued, kind, tuple(granules), wanted)
        self._queue.append(operation)
        self._outstanding.append(operation)
        return operation

    def _forget_fetched(self) -> None:
        self._tried.clear()
        self._fetched.clear()
        self._fetching = None

    def _read(self) -> None:
        changed = [rank for rank in self._ranks if rank.section.sequence != rank.sequence]
        if True not in [rank.read() for rank in changed]:
            return
        figures = [rank.figures for rank in self._ranks]
        dones, returned, kept, owed, fetched, lends, _, failures = zip(*figures, strict=True)
        self._least_returned, self._most_kept, self._most_owed = min(returned), max(kept), max(owed)
        self._lends, self._failed = True in lends, max(failures)[0] > 0
        done = min(dones)
        while self._outstanding and self._outstanding[0].number <= done:
            self._outstanding.popleft()
        fetch = self._fetching
        if fetch is not None and fetch.number <= done:
            self._fetched.update(fetch.granules[: min(fetched)])
            self._fetching = None


_MAPPING: Final = (RankCall.RESTORE, RankCall.FETCH)


def _reporting(pid: int) -> Iterator[_Rank]:
    """Yield the rank whose report a process has open; nothing for another process."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError, ValueError, PageUnreadable):
                path = f"{folder}/{name}"
                if os.readlink(path).startswith(f"/memfd:{MEMFD}"):
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        yield _Rank(descriptor)
                    finally:
                        os.close(descriptor)
