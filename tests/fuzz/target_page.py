"""Fuzz targets of what other processes write: sections of the control page, its latency ring, loans
of pages, what hosts say of themselves, and records of guests. Nothing but the documented errors may
come of any bytes.
"""

import functools
import json
import struct
import tempfile
import zlib
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from executor.control_page import seqlock_records as sections
from executor.control_page.host_description import HostDescription
from executor.control_page.latency_ring import LANES, RING_BYTES, START, LatencyRing
from executor.control_page.page import PAGE_FOLDER
from executor.control_page.seqlock_records import (
    HEADER_BYTES,
    LatencyRecord,
    Record,
    Section,
    section_bytes,
)
from executor.cuda.page_messages import (
    MOST_BYTES,
    MOST_PAGES,
    Hello,
    Lend,
    RequestPages,
    Return,
    Revoke,
    decode,
    encode,
)
from executor.cuda.page_server import LoanLedger
from executor.errors import LoanError, PageError, PageUnreadable
from rose.node.guest.guest_record import running_guests

_SEED: Final = 0xFFFFFFFF
_RECORDS: Final[list[type[Record]]] = [
    kind
    for kind in vars(sections).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
]
_WORDS: Final = struct.Struct("=QQ")


def run_section(data: bytes) -> None:
    """A section of any kind whose header and content are these bytes."""
    for kind in _RECORDS:
        view = bytearray(section_bytes(kind))
        view[: len(data)] = data[: len(view)]
        _read(kind, view)


def run_section_content(data: bytes) -> None:
    """The same with a header that fits: what a mad writer writes by the rules."""
    for kind in _RECORDS:
        size = kind.LAYOUT.size
        payload = data[:size].ljust(size, b"\0")
        view = bytearray(section_bytes(kind))
        view[:HEADER_BYTES] = _WORDS.pack(2, zlib.crc32(payload, 2))
        view[HEADER_BYTES : HEADER_BYTES + size] = payload
        record = _read(kind, view)
        if record is not None:
            # A record that was read from a page may be written into one again.
            assert kind.unpack(record.pack()).pack() == record.pack()


def run_ring(data: bytes) -> None:
    """A latency ring that begins with these bytes, read with a cursor of theirs."""
    view = bytearray(RING_BYTES)
    view[: len(data)] = data[:RING_BYTES]
    ring = LatencyRing(memoryview(view), 0)
    cursor = (int.from_bytes(data[-4:], "little"),) * LANES
    with suppress(PageUnreadable):
        for at in (START, cursor):
            drained = ring.drain(at)
            assert drained.lost >= 0
            assert drained.cursor == ring.cursor
            assert len(drained.records) + drained.lost <= sum(ring.cursor)
    ring.release()


def run_ring_record(data: bytes) -> None:
    """A record by the rules with any content."""
    size = LatencyRecord.LAYOUT.size
    payload = data[:size].ljust(size, b"\0")
    view = bytearray(RING_BYTES)
    view[:8] = (1).to_bytes(8, "little")
    view[64 : 64 + HEADER_BYTES] = _WORDS.pack(2, zlib.crc32(payload, 2 & _SEED))
    view[64 + HEADER_BYTES : 64 + HEADER_BYTES + size] = payload
    ring = LatencyRing(memoryview(view), 0)
    with suppress(PageUnreadable):
        for record in ring.drain().records:
            json.dumps(asdict(record))
    ring.release()


def run_frame(data: bytes) -> None:
    """A message about lent pages."""
    try:
        frame = decode(data)
    except LoanError:
        return
    assert len(data) <= MOST_BYTES
    assert encode(frame) == data


def run_loans(data: bytes) -> None:
    """Borrowers that say anything in any order: each page has one owner, and none is lost."""
    pages = MOST_PAGES
    book = LoanLedger(reserve=4)
    book.put(range(pages))
    held: dict[int, set[int]] = {1: set(), 2: set()}
    for word in data[:256]:
        who, what, number = 1 + (word & 1), (word >> 1) & 3, word >> 3
        if what == 0:
            held[who] |= set(book.lend(who, number))
        elif what == 1:
            given = Return((number,))
            with suppress(LoanError):
                book.returned(who, given.numbers)
                held[who] -= set(given.numbers)
        elif what == 2:
            book.left(who)
        else:
            book.ended(who)
            held[who].clear()
        out = sum(book.out(each) for each in held)
        assert book.in_stock + out + book.stranded == pages
        assert not held[1] & held[2]


def run_lent(data: bytes) -> None:
    """Fuzz a borrower's reading of a lender: numbers are distinct, and within a message's bound."""
    with suppress(LoanError):
        frame = decode(data)
        if isinstance(frame, Lend):
            assert 0 < len(frame.numbers) == len(set(frame.numbers)) <= MOST_PAGES


def run_guest_record(data: bytes) -> None:
    """The record that a dead daemon left of its guest."""
    folder = Path(_run_dir().name)
    (folder / "guests" / "g.json").write_bytes(data)
    for record in running_guests(folder).values():
        assert record.identity.running


def run_host_description(data: bytes) -> None:
    """Fuzz files beside a page in a folder that several users share."""
    page = Path(_run_dir().name) / "h.page"
    page.touch()
    page.with_suffix(".json").write_bytes(data)
    page.with_suffix(".json").chmod(0o600)
    with suppress(PageError):
        said = HostDescription.read(page)
        assert said is not None
        said.write(page)
        assert HostDescription.read(page) == said


@functools.cache
def _run_dir() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="rose-fuzz-", dir=PAGE_FOLDER)
    (Path(folder.name) / "guests").mkdir()
    return folder


def _read(kind: type[Record], view: bytearray) -> Any:
    section: Section[Any] = Section(memoryview(view), 0, kind)
    try:
        return section.read()
    except PageUnreadable:
        return None
    finally:
        section.release()


_FRAMES = tuple(
    encode(frame)
    for frame in (Hello(b"u" * 16, 1 << 21), RequestPages(3), Lend((1, 2)), Revoke(4), Return((1,)))
)
_LATENCY = LatencyRecord(
    request_id="r", finished_ns=9, ttft_ns=1, tpot_ns=2, e2e_ns=5, prompt_tokens=3, output_tokens=4
).pack()
SEEDS: Final[dict[str, tuple[bytes, ...]]] = {
    "run_section": tuple(_WORDS.pack(2, zlib.crc32(b"", 2)) + bytes(64 * n) for n in (1, 4)),
    "run_section_content": tuple(kind().pack() for kind in _RECORDS if kind is not LatencyRecord),
    "run_ring": ((1).to_bytes(8, "little") + bytes(56) + _WORDS.pack(2, 0) + _LATENCY,),
    "run_ring_record": (_LATENCY,),
    "run_frame": _FRAMES,
    "run_lent": _FRAMES,
    "run_loans": (bytes(range(64)),),
    "run_host_description": (
        b'{"model":"m","ttft_s":0.5,"tpot_s":0,"devices":["GPU-0a"],"seated_ns":7}',
    ),
    "run_guest_record": (b'{"identity":{"pid":1,"started":2,"boot":"b"},"spec":"s","secret":"x"}',),
}
