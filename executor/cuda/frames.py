"""What lender and borrower of a GPU's pages say to each other, on a Unix socket of whole messages.

    borrower ── Hello(device, page_bytes) ──> lender
    borrower ── Ask(pages): so many more may be sent ──> lender
    borrower <── Lend(numbers) + a descriptor for each ── lender
    borrower <── Revoke(keep): no more than so many may be kept ── lender
    borrower ── Return(numbers): nothing of this process is on them any more ──> lender

A message is a header (magic, kind, count) and `count` unsigned 64-bit numbers; MOST_BYTES bounds
it. Pages have numbers of the lender's, and each comes with its descriptor in the same order.
"""

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

from executor.errors import LoanError

MOST_PAGES: Final = 64
"""In one message; the kernel passes up to 253 descriptors at once."""
EVERYTHING: Final = 2**64 - 1
_HEADER: Final = struct.Struct("<4sHH")
_NUMBER: Final = struct.Struct("<Q")
_UUID: Final = struct.Struct("<QQ")
_MAGIC: Final = b"RKV1"
MOST_BYTES: Final = _HEADER.size + MOST_PAGES * _NUMBER.size
_HELLO, _LEND, _REVOKE, _RETURN, _ASK = range(1, 6)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first word: which GPU, by its UUID, and pages of how many bytes."""

    device: bytes
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Ask:
    """So many more pages may be sent. What a borrower that hangs has not even received is bounded
    by that, for nobody hears of it."""

    pages: int


@dataclass(frozen=True, slots=True)
class Lend:
    """These pages are the borrower's until it returns them, all zeroed."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """No more pages than this may be kept, whichever, until the next word; EVERYTHING: all may.

    A bound and no number to return: it stays right while returns are on their way.
    """

    keep: int


@dataclass(frozen=True, slots=True)
class Return:
    """These pages are the lender's alone again."""

    numbers: tuple[int, ...]


Frame: TypeAlias = Hello | Ask | Lend | Revoke | Return


def encode(frame: Frame) -> bytes:
    """One message."""
    match frame:
        case Hello(device, page_bytes):
            kind, numbers = _HELLO, (*_UUID.unpack(device), page_bytes)
        case Ask(pages):
            kind, numbers = _ASK, (pages,)
        case Lend(numbers):
            kind = _LEND
        case Return(numbers):
            kind = _RETURN
        case Revoke(keep):
            kind, numbers = _REVOKE, (keep,)
    if len(numbers) > MOST_PAGES:
        raise LoanError(f"{len(numbers)} pages in one message; give at most {MOST_PAGES}")
    header = _HEADER.pack(_MAGIC, kind, len(numbers))
    return header + b"".join(_NUMBER.pack(number) for number in numbers)


def decode(data: bytes) -> Frame:
    """Read one message. Raises LoanError for anything that is none."""
    if len(data) < _HEADER.size:
        raise LoanError(f"a message of {len(data)} bytes has no header")
    magic, kind, count = _HEADER.unpack_from(data)
    if magic != _MAGIC or len(data) != _HEADER.size + count * _NUMBER.size or count > MOST_PAGES:
        raise LoanError(f"a message of {len(data)} bytes is no word about pages")
    numbers = tuple(number for (number,) in _NUMBER.iter_unpack(data[_HEADER.size :]))
    if kind in (_LEND, _RETURN):
        if not numbers or len(set(numbers)) < count:
            raise LoanError("a message names a page twice, or none")
        return Lend(numbers) if kind == _LEND else Return(numbers)
    if kind in (_REVOKE, _ASK) and count == 1:
        return Revoke(numbers[0]) if kind == _REVOKE else Ask(numbers[0])
    if kind == _HELLO and count == 1 + _UUID.size // _NUMBER.size:
        return Hello(_UUID.pack(*numbers[:-1]), numbers[-1])
    raise LoanError(f"a message of kind {kind} with {count} numbers is not known")
