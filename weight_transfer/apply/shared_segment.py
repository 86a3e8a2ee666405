"""Shared memory segment: one process fills it, other processes of the same user read it.

make    a memfd: it has no name in any file system, so nothing is left of it when its last process
        ends, however that ends; sealed, so that no other process can write to it or change its size
open    by another process, through the maker's /proc/PID/fd; a copy-on-write mapping, so that
        nothing that a reader does reaches the maker
elect   of processes that start together, one whose segment all of them use: a file that names it
        appears once, with all of its content, by `link`
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import StoreError

_F_SEAL_FUTURE_WRITE: Final = 0x10  # Python names it from 3.15 on.
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_MAP_NORESERVE: Final = 0x4000  # Not named by every Python; nothing is promised to be written.
_MAX_RECORD_BYTES: Final = 1024
_DRAFT: Final = ".draft-"


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a shared memory segment for other processes, and its identity.

    `namespace`: the process id namespace of `pid`. `device`, `inode`: the kernel's name of the
    memory behind the maker's `descriptor`.
    """

    namespace: int
    pid: int
    descriptor: int
    device: int
    inode: int
    nbytes: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    @property
    def exists(self) -> bool:
        """True if the maker is alive and still has the segment."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)


class SharedSegment:
    """Shared memory segment, mapped into this process.

    `data`: its bytes; what a reader writes there stays in its own process.
    """

    def __init__(self, descriptor: int, mapped: mmap.mmap, address: Address) -> None:
        self._descriptor = descriptor
        self.address = address
        self.data: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)

    @classmethod
    def make(cls, label: str, nbytes: int) -> SharedSegment:
        """Return a new segment of zeros, which takes memory only where it is written to.

        `label` is its name in /proc/PID/maps. Raises StoreError.
        """
        try:
            descriptor = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise StoreError(f"no shared memory can be made: {error}") from error
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, nbytes)
            # Map the writable memory before the seals, which forbid later writable mappings.
            mapped = mmap.mmap(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            status = os.fstat(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise StoreError(f"{nbytes} bytes of shared memory cannot be had: {error}") from error
        ids = _namespace(), os.getpid(), descriptor, status.st_dev, status.st_ino, nbytes
        return cls(descriptor, mapped, Address(*ids))

    @classmethod
    def open(cls, address: Address) -> SharedSegment:
        """Return the segment that another process made, mapped copy-on-write.

        Raises StoreError if it is gone, unsealed, another user's, or in another process id
        namespace.
        """
        if address.namespace != _namespace():
            raise StoreError(
                "the ranks of this node do not see each other's processes; give their containers"
                " one namespace of process ids"
            )
        try:
            descriptor = os.open(address.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(
                f"process {address.pid} shares no weights any more: {error}"
            ) from error
        try:
            _check(descriptor, address)
            mapped = map_private(descriptor, address.nbytes)
        except OSError as error:
            raise StoreError(
                f"what process {address.pid} shares cannot be read: {error}"
            ) from error
        finally:
            os.close(descriptor)
        return cls(-1, mapped, address)

    def withdraw(self) -> None:
        """Prevent further processes from opening the segment; those that have mapped it keep it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.withdraw()


def map_private(descriptor: int, nbytes: int) -> mmap.mmap:
    """Return a copy-on-write mapping of a file: pages are shared until this process writes to them.

    It is writable, because each kernel would be compiled once more for read-only arrays.
    """
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


class ProcessWatch:
    """Watch of the process that made a segment; it stays right if the process id is used again."""

    def __init__(self, address: Address) -> None:
        """Open a handle of the process that made the segment.

        Raise StoreError when it has ended.
        """
        try:
            self._descriptor = os.pidfd_open(address.pid)
        except OSError as error:
            raise StoreError(f"process {address.pid} has ended: {error}") from error
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        if not address.exists:
            raise StoreError(f"process {address.pid} shares no weights any more")

    @property
    def ended(self) -> bool:
        return bool(self._poll.poll(0))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._descriptor)


def ranks_folder() -> Path:
    """Return the folder in memory, named by user id, in which ranks of an engine elect a leader."""
    shared = Path("/dev/shm")  # noqa: S108 -- entered only where it is this user's alone
    root = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return root / f"rose-ranks-{os.geteuid()}"


def elect(place: Path, mine: Address) -> Address:
    """Return the address of the first process that came to `place`, perhaps `mine`.

    The winner's address is written to the file `place`. Records of dead processes in its folder are
    removed. Raises StoreError for a folder or a file of another user.
    """
    folder = place.parent
    _own(folder)
    _sweep(folder)
    try:
        descriptor, draft = tempfile.mkstemp(dir=folder, prefix=_DRAFT)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(mine), file)
        try:
            os.link(draft, place)
        except FileExistsError:
            return _read(place)
        finally:
            os.unlink(draft)
    except OSError as error:
        raise StoreError(f"ranks cannot meet at {place}: {error}") from error
    return mine


def _own(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise StoreError(f"{folder} cannot be made: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or not _is_own(status):
        raise StoreError(f"{folder} is not this user's alone; remove it")


def _sweep(folder: Path) -> None:
    """Remove the records of processes of this namespace that have ended."""
    for path in _files(folder):
        with contextlib.suppress(StoreError, OSError):
            address = _read(path)
            if address.namespace == _namespace() and not address.exists:
                path.unlink()


def _files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        yield from [Path(entry.path) for entry in entries]


def _read(path: Path) -> Address:
    """Return the segment address in a rank's record file.

    Raises StoreError for any other file, or another user's.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            raw = file.read(_MAX_RECORD_BYTES) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if not _is_own(status):
        raise StoreError(f"{path} is not this user's alone; remove it")
    try:
        fields = json.loads(raw)
        address = Address(**fields)
        numbers = all(type(value) is int and value >= 0 for value in fields.values())
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path} names no segment: {error}; remove it") from error
    if not numbers:
        raise StoreError(f"{path} names no segment; remove it")
    return address


def _check(descriptor: int, address: Address) -> None:
    status = os.fstat(descriptor)
    same = (status.st_dev, status.st_ino) == (address.device, address.inode)
    if not (same and _is_own(status) and status.st_size == address.nbytes):
        raise StoreError(f"what process {address.pid} has there is not the segment that it shared")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise StoreError(f"process {address.pid} shares no sealed memory: {error}") from error
    if seals & _SEALS != _SEALS:
        raise StoreError(f"what process {address.pid} shares may still be changed by others")


def _is_own(status: os.stat_result) -> bool:
    """Return True if the file is this user's and closed to all others."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
