"""The control page: the one file that a host, its guest and the node daemon share.

    0      header: magic, layout version, owner pid, created_ns, file size
    64     host section       written by the host's engine core
    …      grant section      written by the node daemon
    …      guest section      written by the guest's engine core
    …      latency ring       written by the host's API process

The file has mode 0600 and belongs to one user. Nothing ever waits on it: writers never block,
readers retry a bounded number of times.
"""

import mmap
import os
import stat
import struct
import time
from pathlib import Path
from typing import Self

from executor.errors import PageError
from executor.latency_ring import RING_BYTES, LatencyRing
from executor.sections import Grant, GuestState, HostState
from executor.seqlock import Section, section_bytes

MAGIC = b"ROSEPAGE"
LAYOUT_VERSION = 3
_HEADER = struct.Struct("=8sIIQQ")
_HOST_AT = 64
_GRANT_AT = _HOST_AT + section_bytes(HostState)
_GUEST_AT = _GRANT_AT + section_bytes(Grant)
_LATENCY_AT = _GUEST_AT + section_bytes(GuestState)
PAGE_BYTES = _LATENCY_AT + RING_BYTES


class ControlPage:
    """A mapped control page; sections are `host`, `grant`, `guest` and `latency`."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._view = memoryview(mapping)
        _, _, self.owner_pid, self.created_ns, _ = _HEADER.unpack_from(mapping)
        self.host: Section[HostState] = Section(self._view, _HOST_AT, HostState)
        self.grant: Section[Grant] = Section(self._view, _GRANT_AT, Grant)
        self.guest: Section[GuestState] = Section(self._view, _GUEST_AT, GuestState)
        self.latency = LatencyRing(self._view, _LATENCY_AT)

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Make a fresh page that appears under `path` whole or not at all.

        Raises PageError when something is there already or the folder cannot be written.
        """
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PageError(f"cannot create control page {target}: {error.strerror}") from error
        try:
            # Blocks now: a mapped file that grows on a full disk kills whoever writes to it, and
            # the host is one of them.
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            header = _HEADER.pack(
                MAGIC, LAYOUT_VERSION, os.getpid(), time.monotonic_ns(), PAGE_BYTES
            )
            os.pwrite(fd, header, 0)
            os.link(draft, target)
        except FileExistsError as error:
            raise PageError(f"control page {target} exists; open it, or delete it first") from error
        except OSError as error:
            raise PageError(f"cannot create control page {target}: {error.strerror}") from error
        finally:
            os.close(fd)
            os.unlink(draft)
        return cls.open(target)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map an existing page.

        Raises PageError when it is missing, another user's, open to others, of another layout
        version, or left over from before the last boot.
        """
        target = Path(path)
        try:
            fd = os.open(target, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise PageError(f"cannot open control page {target}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            _check_owner(target, status)
            _check_header(target, os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
            if status.st_size < PAGE_BYTES:
                raise PageError(f"control page {target} is cut short; delete it")
            mapping = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        return cls(target, mapping)

    @classmethod
    def ensure(cls, path: str | os.PathLike[str]) -> Self:
        """Open the page, or create it when there is none: whoever starts first makes it."""
        if not Path(path).exists():
            try:
                return cls.create(path)
            except PageError:
                if not Path(path).exists():
                    raise
        return cls.open(path)

    def close(self) -> None:
        """Unmap. Sections must not be used afterwards."""
        for section in (self.host, self.grant, self.guest):
            section.release()
        self.latency.release()
        self._view.release()
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise PageError(f"control page {path} is not a regular file; delete it")
    if status.st_uid != os.geteuid():
        raise PageError(f"control page {path} belongs to uid {status.st_uid}; run as that user")
    if status.st_mode & 0o077:
        raise PageError(f"control page {path} is open to other users; chmod 600 it")


def _check_header(path: Path, raw: bytes) -> None:
    magic, version, _, created_ns, size = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise PageError(f"{path} is not a control page; choose another path")
    if version != LAYOUT_VERSION or size != PAGE_BYTES:
        raise PageError(
            f"control page {path} has layout {version}, this build speaks {LAYOUT_VERSION}: "
            "run the same ROSE version in host, guest and node daemon, then delete the page"
        )
    if created_ns > time.monotonic_ns():
        raise PageError(f"control page {path} is from before the last boot; delete it")
