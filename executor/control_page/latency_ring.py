"""The `latency` section: per-request records, a ring for each API process of the host.

    lane 0   count of all records ever, then CAPACITY slots        one writer, by lock
    …
    lane 7

Record n of a lane (counted from 0 over the page's whole life) lives in slot n % CAPACITY, whose
sequence is 2n+1 while it is written and 2n+2 once whole. So a slot itself says which record it
holds, and a reader with a cursor knows exactly which it missed. A writer holds its lane's lock; the
next one continues where a dead one stopped.
"""

import zlib
from typing import Final, NamedTuple

from executor.control_page.host_seat import HeldLock
from executor.control_page.seqlock_records import HEADER_BYTES, WORD, LatencyRecord, section_bytes

LANES: Final = 8
CAPACITY: Final = 512
"""Records that a lane keeps; the node drains it ten times a second."""
SLOT_BYTES = section_bytes(LatencyRecord)
LANE_BYTES = 64 + CAPACITY * SLOT_BYTES
RING_BYTES = LANES * LANE_BYTES
_SEED = 0xFFFFFFFF

Cursor = tuple[int, ...]
START: Final[Cursor] = (0,) * LANES
"""Cursor before the first record of every lane."""


class DrainedRecords(NamedTuple):
    """Result of a drain: new records, the next cursor, and the number of lost records.

    A record is lost if it was overwritten, or torn.
    """

    records: list[LatencyRecord]
    cursor: Cursor
    lost: int


class LatencyLane:
    """Writing end of one lane of the latency ring, for one process that holds the lane's lock."""

    __slots__ = ("_bytes", "_lock", "_next", "_offset", "_words")

    def __init__(self, view: memoryview, words: memoryview, offset: int, lock: HeldLock) -> None:
        """Continue the lane at byte `offset` of `view` where its last writer stopped.

        words: the same memory in 64-bit words. lock: the lane's own, released by `close`.
        """
        self._bytes = view
        self._words = words
        self._offset = offset
        self._lock = lock
        # The previous writer may have died between a slot and the counter: trust the slots. A count
        # that no slot can have is ignored.
        newest = max(words[_slot(offset, n) // WORD] // 2 for n in range(CAPACITY))
        total = words[offset // WORD]
        self._next = max((n for n in (newest, total) if n < 1 << 60), default=0)

    def append(self, record: LatencyRecord) -> None:
        """Publish one record; in a full lane it overwrites the oldest."""
        number = self._next
        start = _slot(self._offset, number)
        word = start // WORD
        payload = record.pack()
        sequence = 2 * number + 2
        self._words[word] = sequence - 1
        self._bytes[start + HEADER_BYTES : start + HEADER_BYTES + len(payload)] = payload
        self._words[word + 1] = zlib.crc32(payload, sequence & _SEED)
        self._words[word] = sequence
        self._next = number + 1
        self._words[self._offset // WORD] = number + 1

    def close(self) -> None:
        """Release the lane's lock, so that another process can take the lane."""
        self._lock.close()


class LatencyRing:
    """Reading end of all lanes, which begin at byte `offset` of `view`."""

    __slots__ = ("_bytes", "_offset", "_words")

    def __init__(self, view: memoryview, offset: int) -> None:
        self._bytes = view
        self._words = view.cast("Q")
        self._offset = offset

    @property
    def cursor(self) -> Cursor:
        """Cursor behind all records appended so far: each lane's total count."""
        return tuple(self._total(lane) for lane in range(LANES))

    def lane(self, number: int, lock: HeldLock) -> LatencyLane:
        """Return the writing end of lane `number`, whose lock the caller holds and passes on."""
        return LatencyLane(self._bytes, self._words, self._lane_at(number), lock)

    def drain(self, cursor: Cursor = START) -> DrainedRecords:
        """Return all records behind `cursor`, lane by lane, with the next cursor.

        Lost records are counted. A count in the cursor beyond a lane's total belongs to an earlier
        page: that lane is read anew.
        """
        records: list[LatencyRecord] = []
        behind, lost = [], 0
        for lane, seen in enumerate(cursor):
            total = self._total(lane)
            first = 0 if seen > total else seen
            oldest = max(first, total - CAPACITY)
            found = [self._read(lane, number) for number in range(oldest, total)]
            whole = [record for record in found if record is not None]
            lost += oldest - first + len(found) - len(whole)
            records += whole
            behind.append(total)
        return DrainedRecords(records, tuple(behind), lost)

    def release(self) -> None:
        """Release the view of the mapped memory; the ring is not usable afterwards."""
        self._words.release()

    def _lane_at(self, lane: int) -> int:
        return self._offset + lane * LANE_BYTES

    def _total(self, lane: int) -> int:
        return self._words[self._lane_at(lane) // WORD]

    def _read(self, lane: int, number: int) -> LatencyRecord | None:
        start = _slot(self._lane_at(lane), number)
        word = start // WORD
        sequence = 2 * number + 2
        if self._words[word] != sequence:
            return None
        payload = bytes(
            self._bytes[start + HEADER_BYTES : start + HEADER_BYTES + LatencyRecord.LAYOUT.size]
        )
        crc = self._words[word + 1]
        # A record whose stores are seen in another order is lost like an overwritten one.
        if self._words[word] != sequence or zlib.crc32(payload, sequence & _SEED) != crc:
            return None
        try:
            return LatencyRecord.unpack(payload)
        except ValueError:
            return None


def _slot(lane_at: int, number: int) -> int:
    return lane_at + 64 + (number % CAPACITY) * SLOT_BYTES
