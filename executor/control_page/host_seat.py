"""Host's seats on the control page (exclusive writer, heartbeat, veto), and the page's locks.

    takes the seat ──► busy on the page ──► publishes, beats ──► stops publishing: busy, vetoes
    cannot publish ──────────────────────────────────────────────────────────────► vetoes

Each engine core of a data-parallel host has a seat of its own. Its engine core's thread writes its
host section, the heartbeat thread its seat section: each has one writer. A beat says that the
process lives and nothing about its work, so it cannot make a busy host look idle, and the host
never waits for it.

Locks on single bytes of the page's file show which processes live, without a clock or a number:

    byte 0        core 0's seat, exclusive  the one process that writes its host section
    byte 1        the veto, shared          engines that serve there and cannot publish
    byte 2        the guard, exclusive      the one node daemon that found the host
    byte 16 + k   lane k, exclusive         the API process that writes that lane of latencies
    byte 32 + k   core k's seat, exclusive  the same for every further engine core, k from 1

They are locks of an open file description (fcntl(2), F_OFD_SETLK). The kernel drops one when the
process that took it ends, however it ends. Any process that can open the file can query them, in
any process namespace, and closing another descriptor of the file drops none. The bytes are the same
in every layout of the page.
"""

import fcntl
import logging
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from executor.control_page.seqlock_records import HostState, PageSection, SeatState

BEAT_S: Final = 0.25
BUSY: Final = HostState(in_step=True, running=1)
_KEPT_VETOES: Final = 4
SEAT: Final = 0
VETO: Final = 1
GUARD: Final = 2
LANES: Final = 16
MOST_CORES: Final = 16
"""Most engine cores that a host may have, and seats on its page."""
_FLOCK: Final = struct.Struct("hhqqi4x")

logger = logging.getLogger("vllm.rose.host")


class HeldLock:
    """File lock on one byte of the control page, held until `close` or the end of the process.

    A child made by fork does not hold the lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def take(cls, path: Path, byte: int, inode: tuple[int, int] | None = None) -> Self | None:
        """Lock `byte` of the file at `path`, without waiting; None if another process holds it.

        Every byte is locked exclusively but VETO, which is shared. inode: (device, inode) that the
        file must still have. Raises OSError if there is no such file, or its file system has no
        such locks.
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
        """Release the lock; closing twice does nothing."""
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
    """Return True if another open description of the file locks `byte`. Raises OSError."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def seat_byte(core: int) -> int:
    """Return the byte whose lock is the seat of engine core number `core`."""
    return 32 + core if core else SEAT


def is_in_use(descriptor: int) -> bool:
    """Return True if another open description of the file locks any byte. Raises OSError."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def inode_of(status: os.stat_result) -> tuple[int, int]:
    """Return the (device, inode) of a file's status, its identity whatever its name."""
    return status.st_dev, status.st_ino


class Beat(threading.Thread):
    """Thread that calls `beat` every BEAT_S seconds until it is stopped or the process ends."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__(name="rose-beat", daemon=True)
        self._beat = beat
        self._ended = threading.Event()

    def run(self) -> None:
        """Call `beat` every BEAT_S until stopped.

        An error is logged and ends the thread, which freezes the guest.
        """
        try:
            while not self._ended.wait(BEAT_S):
                self._beat()
        except Exception:
            logger.exception("the host beats no more; its guest is frozen, the host serves on")

    def stop(self) -> None:
        """Stop the thread, without waiting for a call in progress."""
        self._ended.set()

    def end(self) -> None:
        """Stop the thread and wait, BEAT_S at most, until a call in progress has ended."""
        self._ended.set()
        self.join(timeout=BEAT_S)


class Veto:
    """Shared lock that freezes a page's guests, for an engine that serves but cannot publish.

    The lock is on one file, so `renew` must lock again when another file takes the path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: tuple[int, int] | None = None
        self._locks: list[HeldLock] = []
        self._thread: Beat | None = None

    def start(self) -> None:
        """Lock the present file, and start a thread that locks any file which replaces it later."""
        self.renew()
        self._thread = Beat(self.renew)
        self._thread.start()

    def renew(self) -> None:
        """Lock the file that is at the path now.

        Do nothing if there is none, since no guest can run then.
        """
        try:
            inode = inode_of(os.stat(self._path, follow_symlinks=False))
            if inode == self._inode:
                return
            lock = HeldLock.take(self._path, VETO)
        except OSError:
            return  # Looked at again with the next beat.
        if lock is not None:
            # A guest may still have mapped one of these files; every guest checks the path.
            self._locks = [lock, *self._locks[: _KEPT_VETOES - 1]]
            self._inode = inode

    def close(self) -> None:
        """Release the locks and end the thread."""
        if self._thread is not None:
            self._thread.end()
        for lock in self._locks:
            lock.close()
        self._locks, self._inode = [], None


class HostSeat:
    """Exclusive right of one process to publish as an engine core of a page's host; see
    `take_host`.
    """

    def __init__(
        self,
        path: Path,
        lock: HeldLock,
        host: PageSection[HostState],
        seat: PageSection[SeatState],
        replaced: Callable[[], bool],
        now_ns: int,
        cores: int = 1,
    ) -> None:
        """Publish a busy state and the first heartbeat; an earlier host's state no longer counts.

        lock: the seat's. replaced: returns True if another file is at the page's path. now_ns: the
        time at which the seat was taken. cores: number of the host's engine cores.
        """
        self._lock = lock
        self._host = host
        self._seat = seat
        self._replaced = replaced
        self._veto = Veto(path)
        self._thread: Beat | None = None
        # The engine core's step packs the fields itself.
        self.write_packed: Callable[[bytes], None] = host.write_packed
        self.taken_ns = now_ns
        self._cores = cores
        self._who = _own_identity()
        host.write(HostState(in_step=True, running=1, heartbeat_ns=now_ns))
        self.beat(now_ns)

    def write(self, state: HostState) -> None:
        """Publish `state` in the host section; its `heartbeat_ns` says when it is true."""
        self._host.write(state)

    def beat(self, now_ns: int | None = None) -> None:
        """Publish that this process lives; veto the file that replaced the page's, if one did."""
        beat_ns = time.monotonic_ns() if now_ns is None else now_ns
        self._seat.write(SeatState(*self._who, self.taken_ns, beat_ns, self._cores))
        if self._replaced():
            self._veto.renew()

    def start(self) -> None:
        """Start a thread that publishes a heartbeat every BEAT_S."""
        self._thread = Beat(self.beat)
        self._thread.start()

    def cease(self) -> None:
        """Publish a busy state for good and stop the heartbeats; the seat stays taken."""
        if self._thread is not None:
            self._thread.stop()
        self._host.write(BUSY)

    def close(self) -> None:
        """End the heartbeats and release the seat and the veto, as the end of the process would."""
        if self._thread is not None:
            self._thread.end()
        self._veto.close()
        self._lock.close()


def _own_identity() -> tuple[int, int, int]:
    """Return process id, start time in clock ticks since boot, and inode of the PID namespace.

    The last two are 0 if /proc cannot be read.
    """
    try:
        # The program's name stands in parentheses and may contain any character, parentheses too.
        stat = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        return os.getpid(), int(stat[19]), os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError, IndexError):
        return os.getpid(), 0, 0
