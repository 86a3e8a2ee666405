"""Messages between lender and borrower of GPU pages, on a Unix socket that keeps messages whole.

    borrower ── Hello(device, page_bytes) ──> lender
    borrower ── RequestPages(pages): how many more may be sent ──> lender
    borrower <── Lend(numbers) + a descriptor for each ── lender
    borrower <── Revoke(keep): how many may be kept at most ── lender
    borrower ── Return(numbers): pages that this process has unmapped ──> lender

A message is a header (magic, kind, count) and `count` unsigned 64-bit numbers; MOST_BYTES bounds
it. The lender numbers its pages, and each page comes with its descriptor in the same order. Sending
and receiving never wait.
"""

import array
import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from executor.errors import LoanError

MOST_PAGES: Final = 64
"""Most pages in one message; the kernel passes up to 253 descriptors at once."""
EVERYTHING: Final = 2**64 - 1
_HEADER: Final = struct.Struct("<4sHH")
_NUMBER: Final = struct.Struct("<Q")
_UUID: Final = struct.Struct("<QQ")
_MAGIC: Final = b"RKV1"
MOST_BYTES: Final = _HEADER.size + MOST_PAGES * _NUMBER.size
_HELLO, _LEND, _REVOKE, _RETURN, _ASK = range(1, 6)
_CREDENTIALS: Final = array.array("i", [0, 0, 0])
_INT_BYTES: Final = array.array("i").itemsize


@dataclass(frozen=True, slots=True)
class Hello:
    """First message, borrower to lender: the GPU by its UUID, and the page size in bytes."""

    device: bytes
    page_bytes: int


@dataclass(frozen=True, slots=True)
class RequestPages:
    """Message, borrower to lender: number of further pages that the lender may send.

    It bounds the pages that are sent and not yet received.
    """

    pages: int


@dataclass(frozen=True, slots=True)
class Lend:
    """Message, lender to borrower: zeroed pages by number, the borrower's until it returns them.

    Each page's descriptor comes with it, in the same order.
    """

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Message, lender to borrower: most pages that it may keep from now on; EVERYTHING: all.

    It is a bound and not a number to return, so it stays right while returns are on their way.
    """

    keep: int


@dataclass(frozen=True, slots=True)
class Return:
    """Message, borrower to lender: pages that the borrower has unmapped, by number."""

    numbers: tuple[int, ...]


Frame: TypeAlias = Hello | RequestPages | Lend | Revoke | Return


def encode(frame: Frame) -> bytes:
    """Return a message's bytes. Raises LoanError for more than MOST_PAGES pages."""
    match frame:
        case Hello(device, page_bytes):
            kind, numbers = _HELLO, (*_UUID.unpack(device), page_bytes)
        case RequestPages(pages):
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
    """Return the message that the bytes encode. Raises LoanError for anything else."""
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
        return Revoke(numbers[0]) if kind == _REVOKE else RequestPages(numbers[0])
    if kind == _HELLO and count == 1 + _UUID.size // _NUMBER.size:
        return Hello(_UUID.pack(*numbers[:-1]), numbers[-1])
    raise LoanError(f"a message of kind {kind} with {count} numbers is not known")


class HungUp(Exception):  # noqa: N818 -- a state of the other side
    """Error: the other side closed its socket, or its process ended."""


def send(connection: socket.socket, frame: Frame, descriptors: Sequence[int] = ()) -> bool:
    """Send one message with its descriptors, without waiting; return True if it was sent.

    False if the other side has too much to read already. Raises HungUp.
    """
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    try:
        connection.sendmsg([encode(frame)], passed if descriptors else [], socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        raise HungUp from error
    return True


def receive(connection: socket.socket) -> tuple[Frame, list[int]] | None:
    """Return the next message and its descriptors, which the caller closes; None if there is none.

    Raises HungUp, and LoanError for an invalid message or one with too many descriptors, all of
    which are closed then.
    """
    room = socket.CMSG_SPACE(MOST_PAGES * _INT_BYTES)
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, said, _ = connection.recvmsg(MOST_BYTES, room, flags)
    except BlockingIOError:
        return None
    except OSError as error:
        raise HungUp from error
    descriptors = _descriptors(ancillary)
    try:
        return _whole(data, said), descriptors
    except (HungUp, LoanError):
        close_all(descriptors)
        raise


def close_all(descriptors: Sequence[int]) -> None:
    """Close each of these descriptors; errors are ignored."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def peer_process(connection: socket.socket) -> int:
    """Return a pidfd of the process at the other end: it is readable once that process has ended.

    Raises LoanError for a process of another user, or one that cannot be watched.
    """
    raw = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, len(_CREDENTIALS) * _INT_BYTES
    )
    pid, user, _ = array.array("i", raw)
    if user != os.geteuid():
        raise LoanError(f"user {user} asks for pages of user {os.geteuid()}: refused")
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError) as error:
        raise LoanError(
            f"process {pid}, which asks for pages, cannot be watched ({error}): run both in one PID"
            " namespace"
        ) from error


def has_ended(process: int) -> bool:
    """Return True if the process of this pidfd has ended; its descriptors are closed by then."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _whole(data: bytes, said: int) -> Frame:
    if not data:
        raise HungUp
    if said & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise LoanError(f"a message about pages is longer than {MOST_BYTES} bytes")
    return decode(data)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) // _INT_BYTES * _INT_BYTES])
    return found.tolist()
