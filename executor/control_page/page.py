"""The control page: the one file that a host, its guest and the node daemon share.

    0      header: magic, layout version, owner pid, created_ns, file size, boot id
    64     host section       written by the host's engine core 0, which holds the first seat
    …      grant section      written by the node daemon
    …      guest section      written by the guest's engine core
    …      seat section       written by the heartbeat thread of the first seat's holder
    …      host and seat section of each further engine core of a data-parallel host, 15 of both
    …      latency ring       a lane for each of the host's API processes

The file belongs to one user and has mode 0600, or 0660 if the operator names a group. No process
ever waits on it: it lies in memory (tmpfs or ramfs), since a write to a mapped page of a disk waits
for that disk; writers never block, readers retry a bounded number of times. Locks show which
processes live (`executor.control_page.host_seat`), `host_view` what counts of the host's state.
"""

import ctypes
import grp
import mmap
import os
import stat
import struct
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from executor.control_page.host_seat import (
    GUARD,
    MOST_CORES,
    SEAT,
    VETO,
    HeldLock,
    HostSeat,
    inode_of,
    is_held,
    seat_byte,
)
from executor.control_page.host_seat import LANES as LANE_LOCKS
from executor.control_page.latency_ring import LANES, RING_BYTES, LatencyLane, LatencyRing
from executor.control_page.seqlock_records import (
    NO_DEADLINE,
    Grant,
    GuestState,
    HostState,
    PageSection,
    SeatState,
    section_bytes,
)
from executor.errors import PageError
from executor.freeze_reason import FreezeReason

MAGIC = b"ROSEPAGE"
LAYOUT_VERSION = 6
PAGE_GROUP: Final = "ROSE_PAGE_GROUP"
"""Environment variable that names the group sharing the page, for host and guest; default none."""
PAGE_FOLDER: Final = "/dev/shm"  # noqa: S108 -- pages in it are private
"""Folder in memory that every Linux machine has, for the pages of tools and demos."""
IN_MEMORY: Final = frozenset({0x01021994, 0x858458F6})
"""`f_type` of tmpfs and ramfs, as statfs(2) lists them."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HEADER = struct.Struct("=8sIIQQ16s")
_HOST_AT = 64
_GRANT_AT = _HOST_AT + section_bytes(HostState)
_GUEST_AT = _GRANT_AT + section_bytes(Grant)
_SEAT_AT = _GUEST_AT + section_bytes(GuestState)
_CORES_AT = _SEAT_AT + section_bytes(SeatState)
_CORE_BYTES = section_bytes(HostState) + section_bytes(SeatState)
_LATENCY_AT = _CORES_AT + (MOST_CORES - 1) * _CORE_BYTES
PAGE_BYTES = _LATENCY_AT + RING_BYTES

BEAT_STALE_NS: Final = 1_000_000_000
"""Age at which a host's heartbeat no longer counts, four times the interval between two.

The host sends heartbeats from a thread of its own, since an idle engine runs no other code.
"""
SETTLE_NS: Final = 1_000_000_000
"""Time after which other engines at the page's path have noticed a new file, and vetoed there."""
CLOCK_TOLERANCE_NS: Final = 1_000_000
"""Most that a time stamp may lie in the future: it may be written after the reader's look."""


class CoreSections(NamedTuple):
    """Sections of one engine core of the host, both written by the holder of its seat."""

    state: PageSection[HostState]
    seat: PageSection[SeatState]


def strictest(states: Sequence[HostState]) -> HostState:
    """Return one state for all engine cores of a host, by which no core is worse off than by its
    own.

    It is busy if any core is, has the earliest deadlines and the sums of work and time, the KV
    share of the fullest core and the loan of the core that lends least. `heartbeat_ns` is the
    oldest of the busy cores', since an idle one writes nothing.
    """
    least = min(states, key=_promised_bytes)
    kv_total = sum(state.kv_total for state in states)
    fullest = max(states, key=lambda state: state.kv_used / max(1, state.kv_total))
    return replace(
        least,
        **{name: sum(getattr(state, name) for state in states) for name in _SUMS},
        in_step=any(state.in_step for state in states),
        earliest_prefill_deadline_ns=_earliest(s.earliest_prefill_deadline_ns for s in states),
        earliest_decode_deadline_ns=_earliest(s.earliest_decode_deadline_ns for s in states),
        kv_used=-(-fullest.kv_used * kv_total // max(1, fullest.kv_total)),
        kv_total=kv_total,
        last_step_ns=max(state.last_step_ns for state in states),
        heartbeat_ns=min(s.heartbeat_ns for s in [s for s in states if not s.idle] or states),
        reserve_missing=max(state.reserve_missing for state in states),
    )


_SUMS: Final = "step_seq", "running", "waiting", "queued_prefill_tokens", "busy_ns"


def _promised_bytes(state: HostState) -> float:
    kept = max(0, state.granules_lent - state.reserve_missing)
    return state.bytes_lent * kept / max(1, state.granules_lent)


def _earliest(deadlines_ns: Iterable[int]) -> int:
    return min((each for each in deadlines_ns if each != NO_DEADLINE), default=NO_DEADLINE)


@dataclass(frozen=True, slots=True)
class HostView:
    """One look at a control page's host: its sections (None if unreadable) and its locks.

    cores: views of all engine cores of a data-parallel host, by number, empty for a host of one.
    Its `state` is the `strictest` and its `seat` that of core 0. It counts if each core's does.

    The host's state counts only when all of this holds; otherwise the host counts as busy. The
    default view is one that does not count.

        the file at the page's path is the one that is mapped
        a living process holds the seat, for SETTLE_NS at least, and beat within BEAT_STALE_NS
        no process holds the veto: no engine serves here that cannot publish
        the host section is whole and was written by the holder of the seat
    """

    state: HostState | None = None
    seat: SeatState | None = None
    seated: bool = False
    vetoed: bool = True
    replaced: bool = True
    cores: "tuple[HostView, ...]" = ()

    def doubt(self, now_ns: int) -> FreezeReason | None:
        """Return the first reason not to count the host's state at `now_ns`; None if it counts."""
        if self.cores:
            return next(filter(None, (core.doubt(now_ns) for core in self.cores)), None)
        state, seat = self.state, self.seat
        if self.replaced:
            return FreezeReason.PAGE_REPLACED
        if not self.seated:
            return FreezeReason.NO_HOST
        if self.vetoed:
            return FreezeReason.HOST_VETO
        if seat is None or state is None:
            return FreezeReason.HOST_UNREADABLE
        if now_ns - seat.taken_ns < SETTLE_NS or state.heartbeat_ns < seat.taken_ns:
            return FreezeReason.HOST_STARTING
        # A heartbeat from the future proves nothing about the present.
        if not -CLOCK_TOLERANCE_NS <= now_ns - seat.beat_ns <= BEAT_STALE_NS:
            return FreezeReason.HOST_SILENT
        return None

    @property
    def seats(self) -> "tuple[SeatState | None, ...]":
        """Seat sections of all engine cores, by number."""
        return tuple(core.seat for core in self.cores) or (self.seat,)

    def believed(self, now_ns: int) -> HostState | None:
        """Return the host's state if it counts at `now_ns`, else None."""
        return None if self.doubt(now_ns) else self.state


class ControlPage:
    """Memory-mapped control page of a host, its guest and the node daemon; its sections are fields.

    `host` and `seat` are those of engine core 0, `cores` those of all. Any reader may look at
    `host_state`; a decision to let a guest run must use `host_view`.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, descriptor: int) -> None:
        """Wrap a mapped page.

        descriptor: of the page's file, owned by this object from now on.
        """
        self.path = path
        self._mapping = mapping
        self._descriptor = descriptor
        self.inode = inode_of(os.fstat(descriptor))
        self._view = memoryview(mapping)
        _, _, self.owner_pid, self.created_ns, _, _ = _HEADER.unpack_from(mapping)
        self.host: PageSection[HostState] = PageSection(self._view, _HOST_AT, HostState)
        self.grant: PageSection[Grant] = PageSection(self._view, _GRANT_AT, Grant)
        self.guest: PageSection[GuestState] = PageSection(self._view, _GUEST_AT, GuestState)
        self.seat: PageSection[SeatState] = PageSection(self._view, _SEAT_AT, SeatState)
        further = range(_CORES_AT, _LATENCY_AT, _CORE_BYTES)
        self.cores = CoreSections(self.host, self.seat), *(self._core(at) for at in further)
        self.latency = LatencyRing(self._view, _LATENCY_AT)

    @classmethod
    def create(cls, path: str | os.PathLike[str], group: str = "") -> Self:
        """Create a page at `path` atomically, and return it mapped.

        group: name or number of a group that may map it beside its owner. Raises PageError if the
        path exists, the folder cannot be written or the group cannot be given.
        """
        target = Path(path)
        gid = group_id(group)
        check_folder(target.parent)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PageError(f"cannot create control page {target}: {error.strerror}") from error
        try:
            # Allocate blocks now: a mapped file that grows on a full disk kills the process that
            # writes to it, and the host is one of them.
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            header = _HEADER.pack(
                MAGIC, LAYOUT_VERSION, os.getpid(), time.monotonic_ns(), PAGE_BYTES, _boot_id()
            )
            os.pwrite(fd, header, 0)
            if gid is not None:
                _share(fd, target, group, gid)
            os.link(draft, target)
        except FileExistsError as error:
            raise PageError(f"control page {target} exists; open it, or delete it first") from error
        except OSError as error:
            raise PageError(f"cannot create control page {target}: {error.strerror}") from error
        finally:
            os.close(fd)
            os.unlink(draft)
        return cls.open(target, group)

    @classmethod
    def open(cls, path: str | os.PathLike[str], group: str = "") -> Self:
        """Map the existing page at `path` and return it.

        Raises PageError if it is missing, of neither this user nor `group`, open to others, of
        another layout version, or left over from before the last boot.
        """
        target = Path(path)
        gid = group_id(group)
        try:
            fd = os.open(target, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise PageError(f"cannot open control page {target}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            _check_owner(target, status, gid)
            _check_in_memory(target, fd)
            _check_header(target, os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
            _check_size(target, status)
            mapping = mmap.mmap(fd, PAGE_BYTES)
            return cls(target, mapping, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def ensure(cls, path: str | os.PathLike[str], group: str = "") -> Self:
        """Return the page at `path`, mapped; create it if it does not exist. Raises PageError."""
        if not Path(path).exists():
            try:
                return cls.create(path, group)
            except PageError:
                if not Path(path).exists():
                    raise
        return cls.open(path, group)

    @property
    def replaced(self) -> bool:
        """True if the path no longer names the mapped file, or cannot be read."""
        try:
            return inode_of(os.stat(self.path, follow_symlinks=False)) != self.inode
        except OSError:
            return True

    @property
    def cut_short(self) -> bool:
        """True if the file was truncated: touching its lost part would end this process.

        A process that shares a page with others checks this before it reads or writes.
        """
        return os.fstat(self._descriptor).st_size < PAGE_BYTES

    def host_view(self) -> HostView:
        """Return the present HostView; a truncated page gives one that does not count.

        The locks are read after the sections, so that they vouch for what was read.
        """
        if self.cut_short:
            return HostView()
        state, seat = self.host.peek(), self.seat.peek()
        if seat is not None and seat.cores != 1:
            return self._view_of_cores(state, seat)
        try:
            vetoed = is_held(self._descriptor, VETO)
            seated = is_held(self._descriptor, SEAT)
        except OSError:
            vetoed, seated = True, False
        return HostView(state, seat, seated, vetoed, self.replaced)

    @property
    def host_state(self) -> HostState | None:
        """State that the host published last, the `strictest` of its engine cores'.

        None if a core has written none, or its section cannot be read.
        """
        return self.host_view().state

    def _view_of_cores(self, state: HostState | None, seat: SeatState) -> HostView:
        """Return the view of a host with several engine cores, given the sections of core 0."""
        count = seat.cores
        if not 1 < count <= MOST_CORES:
            return HostView(replaced=self.replaced, seated=True, vetoed=False)
        further = [(core.state.peek(), core.seat.peek()) for core in self.cores[1:count]]
        # A core that counts its host's cores otherwise belongs to another host.
        own = [(state if seat and seat.cores == count else None, seat) for state, seat in further]
        read = [(state, seat), *own]
        try:
            vetoed = is_held(self._descriptor, VETO)
            seats = [is_held(self._descriptor, seat_byte(core)) for core in range(count)]
        except OSError:
            vetoed, seats = True, [False] * count
        replaced = self.replaced
        cores = tuple(
            HostView(*sections, seated, vetoed, replaced)
            for sections, seated in zip(read, seats, strict=True)
        )
        states = [core.state for core in cores if core.state is not None]
        merged = strictest(states) if len(states) == count else None
        return HostView(merged, seat, all(seats), vetoed, replaced, cores)

    def take_host(self, now_ns: int | None = None, core: int = 0, cores: int = 1) -> HostSeat:
        """Take the seat of engine core `core` of the `cores` of the page's host, and return it.

        Close it to give it up; the end of the process gives it up, too. Raises PageError if another
        process has the seat or a seat beyond `cores`, for too many cores, and if the page at the
        path is another one.
        """
        if cores > MOST_CORES:
            raise PageError(
                f"a host of {cores} engine cores has no page, which has {MOST_CORES} seats; start"
                " several servers with a page each"
            )
        lock = self._lock(seat_byte(core))
        beyond = range(cores, MOST_CORES)
        strays = [n for n in beyond if is_held(self._descriptor, seat_byte(n))]
        if lock is None or strays:
            seat = self.cores[core if lock is None else strays[0]].seat.peek()
            holder = f"process {seat.pid}" if seat is not None else "another process"
            if lock is not None:
                lock.close()
            raise PageError(
                f"control page {self.path} has a host: {holder}; give each server a page of its own"
            )
        taken_ns = time.monotonic_ns() if now_ns is None else now_ns
        sections = self.cores[core]
        return HostSeat(self.path, lock, *sections, lambda: self.replaced, taken_ns, cores)

    def take_guard(self) -> HeldLock:
        """Take and return the lock of the one node daemon that may write grants here.

        Raises PageError if another daemon holds it.
        """
        lock = self._lock(GUARD)
        if lock is None:
            raise PageError(
                f"control page {self.path} has a node daemon already; stop that one, or name it in"
                " one daemon's configuration only"
            )
        return lock

    def take_lane(self) -> LatencyLane:
        """Take and return a free lane of the latency ring. Raises PageError if all are taken."""
        for number in range(LANES):
            if (lock := self._lock(LANE_LOCKS + number)) is not None:
                return self.latency.lane(number, lock)
        raise PageError(f"control page {self.path} takes latencies of {LANES} processes, no more")

    def close(self) -> None:
        """Unmap the page and close its file; sections must not be used afterwards."""
        sections: list[PageSection[Any]] = [self.grant, self.guest]
        for section in sections + [section for core in self.cores for section in core]:
            section.release()
        self.latency.release()
        self._view.release()
        self._mapping.close()
        os.close(self._descriptor)

    def _core(self, at: int) -> CoreSections:
        seat_at = at + section_bytes(HostState)
        return CoreSections(
            PageSection(self._view, at, HostState), PageSection(self._view, seat_at, SeatState)
        )

    def _lock(self, byte: int) -> HeldLock | None:
        try:
            return HeldLock.take(self.path, byte, self.inode)
        except OSError as error:
            why = error.strerror or "it is another file now"
            raise PageError(f"cannot lock control page {self.path}: {why}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def file_system_type(place: int | Path) -> int:
    """Return the `f_type` that statfs(2) reports for a descriptor or path. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    fields = (ctypes.c_long * 64)()
    if isinstance(place, int):
        failed = libc.fstatfs(place, fields)
    else:
        failed = libc.statfs(os.fsencode(place), fields)
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(place))
    return fields[0] & 0xFFFFFFFF


def check_folder(folder: Path) -> None:
    """Raise PageError if `folder` is on a disk; a missing folder passes."""
    with suppress(OSError):
        _check_in_memory(folder, folder)


def on_disk(folder: Path) -> bool:
    """Return True if `folder`, or its nearest existing parent, is not in memory. Raises OSError."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return file_system_type(folder) not in IN_MEMORY


def _check_in_memory(path: Path, place: int | Path) -> None:
    if file_system_type(place) not in IN_MEMORY:
        raise PageError(
            f"control page {path} is on a disk, for which its host would wait; use a path in"
            f" memory: below {PAGE_FOLDER}, or below /run where that is a tmpfs"
        )


def group_id(group: str) -> int | None:
    """Return the number of a group given by name or number; None for "". Raises PageError."""
    if not group:
        return None
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise PageError(f"there is no group {group}; name one that host and node are in") from None


def _share(fd: int, path: Path, group: str, gid: int) -> None:
    try:
        os.fchown(fd, -1, gid)
    except PermissionError:
        raise PageError(
            f"control page {path} cannot be given to group {group}; name one that this user is in"
        ) from None
    os.fchmod(fd, 0o660)


def _check_owner(path: Path, status: os.stat_result, gid: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise PageError(f"control page {path} is not a regular file; delete it")
    mode = stat.S_IMODE(status.st_mode)
    if gid is not None and status.st_gid == gid and not mode & 0o007:
        return
    if status.st_uid != os.geteuid():
        raise PageError(
            f"control page {path} belongs to uid {status.st_uid}; run as that user, or name a"
            " group for the page that both are in"
        )
    if mode & 0o077:
        raise PageError(
            f"control page {path} is open to other users (mode {mode:o}, group {status.st_gid});"
            " chmod 600 it, or name its group and chmod 660 it"
        )


def _check_size(path: Path, status: os.stat_result) -> None:
    if status.st_size < PAGE_BYTES:
        raise PageError(f"control page {path} is cut short; delete it")


def _boot_id() -> bytes:
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError) as error:
        raise PageError(f"{_BOOT_ID} cannot be read: {error}; mount /proc") from error


def _check_header(path: Path, raw: bytes) -> None:
    magic, version, _, _, size, boot = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise PageError(f"{path} is not a control page; choose another path")
    if version != LAYOUT_VERSION or size != PAGE_BYTES:
        raise PageError(
            f"control page {path} has layout {version}, this build speaks {LAYOUT_VERSION}: "
            "run the same ROSE version in host, guest and node daemon, then delete the page"
        )
    if boot != _boot_id():
        raise PageError(f"control page {path} is from before the last boot; delete it")
