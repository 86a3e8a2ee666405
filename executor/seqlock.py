"""One single-writer record in shared memory, guarded by a sequence lock and a CRC.

    word 0  sequence: 0 never written, odd while a write is under way, even when whole
    word 1  CRC-32 of the payload, seeded with the sequence
    then    payload

The CRC catches what the sequence cannot: a store order other than the one written here, a second
writer by mistake, a payload of another generation. A writer that died leaves an odd sequence; the
next write, by whoever holds the section then, moves on to a fresh even one.
"""

import struct
import time
import zlib
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from executor.errors import PageUnreadable

WORD = 8
HEADER_BYTES = 2 * WORD
SPINS = 8
NAPS = 4
NAP_S = 50e-6
_SEED = 0xFFFFFFFF


class Record(Protocol):
    """A fixed-size record; the dataclasses of `executor.sections` are such."""

    LAYOUT: ClassVar[struct.Struct]

    def pack(self) -> bytes:
        """Binary form of LAYOUT.size bytes."""
        ...

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Inverse of pack."""
        ...


R = TypeVar("R", bound=Record)


def section_bytes(record: type[Record]) -> int:
    """Bytes that a section of `record` takes, rounded up to a cache line."""
    return -(-(HEADER_BYTES + record.LAYOUT.size) // 64) * 64


class Section(Generic[R]):
    """Typed access to the section that starts at byte `offset` (a multiple of 8) of `view`."""

    __slots__ = ("_bytes", "_end", "_record", "_start", "_word", "_words")

    def __init__(self, view: memoryview, offset: int, record: type[R]) -> None:
        self._bytes = view
        # Aligned native 64-bit stores: a reader sees an old or a new sequence, never half of each.
        self._words = view.cast("Q")
        self._word = offset // WORD
        self._start = offset + HEADER_BYTES
        self._end = self._start + record.LAYOUT.size
        self._record = record

    @property
    def sequence(self) -> int:
        """Raw sequence word; it changes with every write."""
        return self._words[self._word]

    def write(self, record: R) -> None:
        """Publish `record`. Only the section's one writer may call this."""
        self.write_packed(record.pack())

    def write_packed(self, payload: bytes) -> None:
        """Publish a record's binary form, LAYOUT.size bytes; for who writes at every step."""
        words, word = self._words, self._word
        writing = (words[word] + 1) | 1
        words[word] = writing
        self._bytes[self._start : self._end] = payload
        words[word + 1] = zlib.crc32(payload, (writing + 1) & _SEED)
        words[word] = writing + 1

    def read(self) -> R | None:
        """The last whole record, None when nothing was ever written.

        Raises PageUnreadable when no consistent content was seen in a bounded number of tries.
        """
        for attempt in range(SPINS + NAPS):
            if attempt >= SPINS:
                time.sleep(NAP_S)
            before = self._words[self._word]
            if before == 0:
                return None
            if before & 1:
                continue
            payload = bytes(self._bytes[self._start : self._end])
            crc = self._words[self._word + 1]
            if self._words[self._word] == before and zlib.crc32(payload, before & _SEED) == crc:
                return self._decode(payload)
        raise PageUnreadable(
            f"{self._record.__name__} section stays torn: its writer died in a write or hangs"
        )

    def peek(self) -> R | None:
        """Like read, but None also stands for an unreadable section."""
        try:
            return self.read()
        except PageUnreadable:
            return None

    def release(self) -> None:
        """Let go of the mapping."""
        self._words.release()

    def _decode(self, payload: bytes) -> R:
        try:
            return self._record.unpack(payload)
        except (ValueError, struct.error) as error:
            raise PageUnreadable(f"{self._record.__name__} section: {error}") from error
