"""Leases of a SQLite store, in a small file beside it that all processes of the machine share.

    64 bytes          24 bytes for each lease
    boot id           id, TTL, end (seconds of CLOCK_BOOTTIME)

Not in the database, whose file another program may lock and whose disk may be full: a leader that
can write nothing for a while still leads. Renewing writes in place, into the page cache, which is
where the other processes look; it need not reach the disk, since no lease outlives its boot. The
clock counts suspended time. Each operation holds the file's lock for some microseconds.
"""

import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rose.clock import boot_clock_s
from rose.errors import UnavailableError

_LEASE = struct.Struct("<Qdd")
HEADER_BYTES = 64
MAX_LEASES = 256
# A process that was stopped while it held the lock is waited for so long.
LOCK_S = 1.0
_PAUSE_S = 0.001


def boot_id() -> str:
    """Return the id of this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class LeaseFile:
    """Leases by id. A lease that was found over once is over for ever."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # The file's lock keeps other processes out, not other threads of this one.
        self._threads = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        header = boot_id().encode().ljust(HEADER_BYTES, b"\0")
        with self._locked():
            if os.pread(self._file, HEADER_BYTES, 0) != header:
                # All room at once: later writes are in place and need none.
                os.pwrite(self._file, header + bytes(_LEASE.size * MAX_LEASES), 0)

    def grant(self, ttl_s: float) -> int:
        """Make a lease that lives for `ttl_s` from now; returns its id."""
        lease = secrets.randbits(62) | 1
        with self._locked():
            now_s = boot_clock_s()
            for slot, (_, _, end_s) in self._slots():
                if end_s <= now_s:
                    self._write(slot, lease, ttl_s, now_s + ttl_s)
                    return lease
        raise UnavailableError(f"{self._path} holds {MAX_LEASES} live leases; stop some schedulers")

    def keep(self, lease: int) -> float:
        """Renew; returns the seconds left, 0 for one that is over."""
        with self._locked():
            now_s = boot_clock_s()
            for slot, (name, ttl_s, end_s) in self._slots():
                if name == lease and now_s < end_s:
                    self._write(slot, lease, ttl_s, now_s + ttl_s)
                    return ttl_s
        return 0.0

    def end(self, lease: int) -> None:
        """End it, whether it lives or not."""
        with self._locked():
            for slot, (name, _, _) in self._slots():
                if name == lease:
                    self._write(slot, 0, 0.0, 0.0)

    def over(self, leases: Iterable[int]) -> set[int]:
        """Return the expired leases, which cannot be renewed from now on."""
        over = set(leases)
        with self._locked():
            now_s = boot_clock_s()
            for slot, (name, _, end_s) in self._slots():
                if name in over and now_s < end_s:
                    over.discard(name)
                elif name in over:
                    self._write(slot, 0, 0.0, 0.0)
        return over

    def close(self) -> None:
        os.close(self._file)

    def _slots(self) -> Iterator[tuple[int, tuple[int, float, float]]]:
        content = os.pread(self._file, _LEASE.size * MAX_LEASES, HEADER_BYTES)
        return enumerate(_LEASE.iter_unpack(content))

    def _write(self, slot: int, lease: int, ttl_s: float, end_s: float) -> None:
        at = HEADER_BYTES + slot * _LEASE.size
        os.pwrite(self._file, _LEASE.pack(lease, ttl_s, end_s), at)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock. Raises `UnavailableError` where somebody else does for long."""
        with self._threads:
            try:
                self._lock()
                try:
                    yield
                finally:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            except OSError as error:
                raise UnavailableError(
                    f"leases {self._path} do not answer ({error}); check the store's disk"
                ) from error

    def _lock(self) -> None:
        until_s = time.monotonic() + LOCK_S
        while not self._try_lock():
            if time.monotonic() >= until_s:
                raise UnavailableError(f"{self._path} is locked; is a scheduler stopped?")
            time.sleep(_PAUSE_S)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
