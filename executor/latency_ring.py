"""The `latency` section: a ring of per-request records behind a total counter.

Record n (counted from 0 over the page's whole life) lives in slot n % capacity, whose sequence is
2n+1 while it is written and 2n+2 once whole. So a slot says by itself which record it holds, and a
reader with a cursor knows exactly what it missed.
"""

import zlib
from typing import NamedTuple

from executor.errors import PageUnreadable
from executor.sections import LatencyRecord
from executor.seqlock import HEADER_BYTES, WORD, section_bytes

CAPACITY = 4096
SLOT_BYTES = section_bytes(LatencyRecord)
RING_BYTES = 64 + CAPACITY * SLOT_BYTES
_SEED = 0xFFFFFFFF


class Drained(NamedTuple):
    """Records after a cursor, the cursor to go on from, and how many were overwritten unread."""

    records: list[LatencyRecord]
    cursor: int
    lost: int


class LatencyRing:
    """Single-writer ring at byte `offset` of `view`; its first word is the total count."""

    __slots__ = ("_bytes", "_next", "_offset", "_words")

    def __init__(self, view: memoryview, offset: int) -> None:
        self._bytes = view
        self._words = view.cast("Q")
        self._offset = offset
        self._next: int | None = None

    @property
    def total(self) -> int:
        """Records ever appended."""
        return self._words[self._offset // WORD]

    def append(self, record: LatencyRecord) -> None:
        """Publish one record, overwriting the oldest. Only the ring's one writer may call this."""
        if self._next is None:
            self._next = self._recovered_total()
        number = self._next
        start = self._slot(number)
        word = start // WORD
        payload = record.pack()
        sequence = 2 * number + 2
        self._words[word] = sequence - 1
        self._bytes[start + HEADER_BYTES : start + HEADER_BYTES + len(payload)] = payload
        self._words[word + 1] = zlib.crc32(payload, sequence & _SEED)
        self._words[word] = sequence
        self._next = number + 1
        self._words[self._offset // WORD] = number + 1

    def drain(self, cursor: int, limit: int = CAPACITY) -> Drained:
        """Up to `limit` records from number `cursor` on.

        A cursor beyond the total belongs to an earlier page and starts over at 0.
        """
        total = self.total
        if cursor > total:
            cursor = 0
        oldest = max(cursor, total - CAPACITY)
        lost = oldest - cursor
        end = min(total, oldest + limit)
        records = []
        for number in range(oldest, end):
            record = self._read(number)
            if record is None:
                lost += 1
            else:
                records.append(record)
        return Drained(records, end, lost)

    def release(self) -> None:
        """Let go of the mapping."""
        self._words.release()

    def _slot(self, number: int) -> int:
        return self._offset + 64 + (number % CAPACITY) * SLOT_BYTES

    def _read(self, number: int) -> LatencyRecord | None:
        start = self._slot(number)
        word = start // WORD
        sequence = 2 * number + 2
        if self._words[word] != sequence:
            return None
        payload = bytes(
            self._bytes[start + HEADER_BYTES : start + HEADER_BYTES + LatencyRecord.LAYOUT.size]
        )
        crc = self._words[word + 1]
        if self._words[word] != sequence:
            return None
        if zlib.crc32(payload, sequence & _SEED) != crc:
            raise PageUnreadable(f"latency record {number} fails its CRC: a second writer?")
        return LatencyRecord.unpack(payload)

    def _recovered_total(self) -> int:
        # The previous writer may have died between a slot and the counter: the slots know better.
        newest = max(self._words[self._slot(n) // WORD] // 2 for n in range(CAPACITY))
        return max(newest, self.total)
