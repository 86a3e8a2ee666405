"""Locks on single bytes of the control page's file: liveness that needs no clock and no number.

    byte 0        the seat, exclusive       the one engine core that writes the host section
    byte 1        the veto, shared          engines that serve there and cannot publish
    byte 2        the guard, exclusive      the one node daemon that found the host
    byte 16 + k   lane k, exclusive         the API process that writes that lane of latencies

They are locks of an open file description (fcntl(2), F_OFD_SETLK). The kernel drops one when the
process that took it ends, however it ends. Any process that can open the file can query them, in
any process namespace, and closing another descriptor of the file drops none. The bytes are the same
in every layout of the page.
"""

import fcntl
import os
import stat
import struct
import weakref
from pathlib import Path
from typing import Final, Self

SEAT: Final = 0
VETO: Final = 1
GUARD: Final = 2
LANES: Final = 16
_FLOCK: Final = struct.Struct("hhqqi4x")


class HeldLock:
    """A lock that this process holds until it ends or closes it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def take(cls, path: Path, byte: int, inode: tuple[int, int] | None = None) -> Self | None:
        """Lock `byte` of the file at `path`; None if another process holds it.

        inode: the (device, inode) that the file must still be. Raises OSError if there is no such
        file, or no such lock on its file system.
        """
        shared = byte == VETO
        access = os.O_RDONLY if shared else os.O_RDWR
        # The path may name anything, and opening it must not wait.
        descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            _check_file(path, status, inode)
            kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def close(self) -> None:
        """Unlock and close."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _check_file(path: Path, status: os.stat_result, inode: tuple[int, int] | None) -> None:
    if not stat.S_ISREG(status.st_mode) or inode not in (None, inode_of(status)):
        raise FileNotFoundError(f"{path} is another file now")


_held: "weakref.WeakSet[HeldLock]" = weakref.WeakSet()


def _let_go() -> None:
    # The description is shared with the parent, whose lock must end with the parent.
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go)


def is_held(descriptor: int, byte: int) -> bool:
    """Return True if another description of the file holds the lock. Raises OSError."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def is_in_use(descriptor: int) -> bool:
    """Return True if another description of the file holds any lock. Raises OSError."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def inode_of(status: os.stat_result) -> tuple[int, int]:
    """Return a file's identity, whatever its name."""
    return status.st_dev, status.st_ino
