"""Host's seat on the control page (exclusive writer, heartbeat, veto), and a guest's view of it.

    takes the seat ──► busy on the page ──► publishes, beats ──► publishes no more: busy, vetoes
    cannot publish ────────────────────────────────────────────────────────────────► vetoes

The engine core's thread writes the host section, the heartbeat thread the seat section: each has
one writer. A beat says that the process lives and nothing about its work, so it cannot make a busy
host look idle, and the host never waits for it.

`HostView` is one look at the page by a guard or guest. The host's state counts when all of this
holds, and the host counts as busy otherwise:

    the file at the page's path is the one that is mapped
    a living process holds the seat, for SETTLE_NS at least, and beat within BEAT_STALE_NS
    nobody holds the veto: no engine serves here that cannot publish
    the host section is whole and was written by the holder of the seat
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from executor.control_page.byte_locks import VETO, HeldLock, inode_of
from executor.control_page.seqlock_records import HostState, SeatState, Section
from executor.freeze_reason import FreezeReason

BEAT_S: Final = 0.25
BUSY: Final = HostState(in_step=True, running=1)
_KEPT_VETOES: Final = 4

logger = logging.getLogger("vllm.rose.host")


class Beat(threading.Thread):
    """Calls `beat` every BEAT_S for as long as the process lives, or until it is stopped."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__(name="rose-beat", daemon=True)
        self._beat = beat
        self._ended = threading.Event()

    def run(self) -> None:
        """Beat. One that breaks says so once and stops, which freezes the guest."""
        try:
            while not self._ended.wait(BEAT_S):
                self._beat()
        except Exception:
            logger.exception("the host beats no more; its guest is frozen, the host serves on")

    def stop(self) -> None:
        """Beat no more; who calls does not wait for it."""
        self._ended.set()

    def end(self) -> None:
        """Beat no more, and return when the last one is over."""
        self._ended.set()
        self.join(timeout=BEAT_S)


class Veto:
    """Keeps guests from running at a path: for an engine that serves there and cannot publish.

    Held on the very file, so it has to be renewed where the path gets another one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: tuple[int, int] | None = None
        self._locks: list[HeldLock] = []
        self._thread: Beat | None = None

    def start(self) -> None:
        """Veto now, and from a thread whatever file is there later."""
        self.renew()
        self._thread = Beat(self.renew)
        self._thread.start()

    def renew(self) -> None:
        """Veto the file that is there now. Where there is none, no guest can run."""
        try:
            inode = inode_of(os.stat(self._path, follow_symlinks=False))
            if inode == self._inode:
                return
            lock = HeldLock.take(self._path, VETO)
        except OSError:
            return  # Looked at again with the next beat.
        if lock is not None:
            # Files of which a guest may still hold a mapping; the path is what everybody checks.
            self._locks = [lock, *self._locks[: _KEPT_VETOES - 1]]
            self._inode = inode

    def close(self) -> None:
        """Take it back."""
        if self._thread is not None:
            self._thread.end()
        for lock in self._locks:
            lock.close()
        self._locks, self._inode = [], None


class HostSeat:
    """What `ControlPage.take_host` gives to the one process that publishes as the host."""

    def __init__(
        self,
        path: Path,
        lock: HeldLock,
        host: Section[HostState],
        seat: Section[SeatState],
        replaced: Callable[[], bool],
        now_ns: int,
    ) -> None:
        """Busy is the first word of every life; what an earlier one said counts no more."""
        self._lock = lock
        self._host = host
        self._seat = seat
        self._replaced = replaced
        self._veto = Veto(path)
        self._thread: Beat | None = None
        # For the engine core's step, which packs as it goes.
        self.write_packed: Callable[[bytes], None] = host.write_packed
        self.taken_ns = now_ns
        self._who = _own_identity()
        host.write(HostState(in_step=True, running=1, heartbeat_ns=now_ns))
        self.beat(now_ns)

    def write(self, state: HostState) -> None:
        """Publish a state, stamped with the moment of which it is true."""
        self._host.write(state)

    def beat(self, now_ns: int | None = None) -> None:
        """Say that this process lives; and where the page got another file, veto that one."""
        beat_ns = time.monotonic_ns() if now_ns is None else now_ns
        self._seat.write(SeatState(*self._who, taken_ns=self.taken_ns, beat_ns=beat_ns))
        if self._replaced():
            self._veto.renew()

    def start(self) -> None:
        """Beat from a thread from now on."""
        self._thread = Beat(self.beat)
        self._thread.start()

    def cease(self) -> None:
        """Publish no more: busy for good, without a beat, the seat kept from everybody else."""
        if self._thread is not None:
            self._thread.stop()
        self._host.write(BUSY)

    def close(self) -> None:
        """Leave the seat, as the end of the process does."""
        if self._thread is not None:
            self._thread.end()
        self._veto.close()
        self._lock.close()


def _own_identity() -> tuple[int, int, int]:
    """Process number, start in clock ticks since boot, process namespace; zeros where unknown."""
    try:
        # The program's name stands in parentheses and may contain anything, these included.
        stat = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        return os.getpid(), int(stat[19]), os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError, IndexError):
        return os.getpid(), 0, 0


BEAT_STALE_NS: Final = 1_000_000_000
"""A host beats four times as often, from a thread of its own: an idle engine runs no other code."""
SETTLE_NS: Final = 1_000_000_000
"""In which any other engine of the path has seen that the file is new, and vetoed."""
CLOCK_TOLERANCE_NS: Final = 1_000_000
"""Two processes read one clock, yet one may have stamped a little after the other looked."""


@dataclass(frozen=True, slots=True)
class HostView:
    """Sections as read, None for one that cannot be; `seated`, `vetoed`: whether the lock is held.

    The default is what nobody may believe.
    """

    state: HostState | None = None
    seat: SeatState | None = None
    seated: bool = False
    vetoed: bool = True
    replaced: bool = True

    def doubt(self, now_ns: int) -> FreezeReason | None:
        """Why the state counts for nothing; None when it counts."""
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

    def believed(self, now_ns: int) -> HostState | None:
        """The state, None while anything speaks against it."""
        return None if self.doubt(now_ns) else self.state
