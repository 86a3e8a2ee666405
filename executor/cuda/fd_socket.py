"""Frames with file descriptors over a Unix socket that keeps messages whole; nothing here waits."""

import array
import contextlib
import os
import select
import socket
from collections.abc import Sequence
from typing import Final

from executor.cuda.frames import MOST_BYTES, MOST_PAGES, Frame, decode, encode
from executor.errors import LoanError

_CREDENTIALS: Final = array.array("i", [0, 0, 0])
_INT_BYTES: Final = array.array("i").itemsize


class HungUp(Exception):  # noqa: N818 -- a state of the other side
    """The other side closed its socket, or its process ended."""


def send(connection: socket.socket, frame: Frame, descriptors: Sequence[int] = ()) -> bool:
    """Send one frame with its descriptors; False when the other side has too much to read.

    Raises HungUp.
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
    """Return the next frame and the caller's descriptors, None when there is none yet.

    Raises HungUp, and LoanError for what is no frame or passes more descriptors than it may; none
    stays open then.
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
    """Close descriptors, each once."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def peer_process(connection: socket.socket) -> int:
    """Return a descriptor of the process at the other end that is readable once it has ended.

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
    """Whether a watched process ended; all that it had open is closed by then."""
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
