"""Host's seat on the control page (exclusive writer, heartbeat, veto), and a guest's view of it.

    takes the seat ──► busy on the page ──► publishes, beats ──► stops publishing: busy, vetoes
    cannot publish ──────────────────────────────────────────────────────────────► vetoes

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
    """Thread that calls `beat` every BEAT_S until it is stopped or the process ends."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__(name="rose-beat", daemon=True)
        self._beat = beat
        self._ended = threading.Event()

    def run(self) -> None:
        """Beat. An error is logged once and ends the beats, which freezes the guest."""
        try:
            while not self._ended.wait(BEAT_S):
                self._beat()
        except Exception:
            logger.exception("the host beats no more; its guest is frozen, the host serves on")

    def stop(self) -> None:
        """Stop beating, without waiting for the last beat."""
        self._ended.set()

    def end(self) -> None:
        """Stop beating, and return when the last beat is over."""
        self._ended.set()
        self.join(timeout=BEAT_S)


class Veto:
    """Lock that keeps guests from running at a path: for an engine there that cannot publish.

    It is held on the very file, so it has to be renewed when the path gets another one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: tuple[int, int] | None = None
        self._locks: list[HeldLock] = []
        self._thread: Beat | None = None

    def start(self) -> None:
        """Veto now, and from a thread any file that is there later."""
        self.renew()
        self._thread = Beat(self.renew)
        self._thread.start()

    def renew(self) -> None:
        """Veto the present file. Without one no guest can run."""
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
        """Withdraw the veto."""
        if self._thread is not None:
            self._thread.end()
        for lock in self._locks:
            lock.close()
        self._locks, self._inode = [], None


class HostSeat:
    """Seat of `ControlPage.take_host`, for the one process that publishes as the host."""

    def __init__(
        self,
        path: Path,
        lock: HeldLock,
        host: Section[HostState],
        seat: Section[SeatState],
        replaced: Callable[[], bool],
        now_ns: int,
    ) -> None:
        """The first state of every life is busy; that of an earlier life no longer counts."""
        self._lock = lock
        self._host = host
        self._seat = seat
        self._replaced = replaced
        self._veto = Veto(path)
        self._thread: Beat | None = None
        # The engine core's step packs the fields itself.
        self.write_packed: Callable[[bytes], None] = host.write_packed
        self.taken_ns = now_ns
        self._who = _own_identity()
        host.write(HostState(in_step=True, running=1, heartbeat_ns=now_ns))
        self.beat(now_ns)

    def write(self, state: HostState) -> None:
        """Publish a state with the time at which it is true."""
        self._host.write(state)

    def beat(self, now_ns: int | None = None) -> None:
        """Publish that this process lives; and veto the page's file if it was replaced."""
        beat_ns = time.monotonic_ns() if now_ns is None else now_ns
        self._seat.write(SeatState(*self._who, taken_ns=self.taken_ns, beat_ns=beat_ns))
        if self._replaced():
            self._veto.renew()

    def start(self) -> None:
        """Start a thread that beats."""
        self._thread = Beat(self.beat)
        self._thread.start()

    def cease(self) -> None:
        """Publish no more: busy for good, without a beat; keep the seat from other processes."""
        if self._thread is not None:
            self._thread.stop()
        self._host.write(BUSY)

    def close(self) -> None:
        """Leave the seat, like the end of the process."""
        if self._thread is not None:
            self._thread.end()
        self._veto.close()
        self._lock.close()


def _own_identity() -> tuple[int, int, int]:
    """Return process number, start in clock ticks since boot, process namespace; else zeros."""
    try:
        # The program's name stands in parentheses and may contain any character, parentheses too.
        stat = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        return os.getpid(), int(stat[19]), os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError, IndexError):
        return os.getpid(), 0, 0


BEAT_STALE_NS: Final = 1_000_000_000
"""A host beats four times as often, from a thread of its own: an idle engine runs no other code."""
SETTLE_NS: Final = 1_000_000_000
"""Time in which any other engine of the path has noticed the new file, and vetoed."""
CLOCK_TOLERANCE_NS: Final = 1_000_000
"""Two processes read one clock, yet one may stamp a little after the other looked."""


@dataclass(frozen=True, slots=True)
class HostView:
    """Sections, None for an unreadable one; `seated`, `vetoed`: whether the lock is held.

    The default view is not to be trusted.
    """

    state: HostState | None = None
    seat: SeatState | None = None
    seated: bool = False
    vetoed: bool = True
    replaced: bool = True

    def doubt(self, now_ns: int) -> FreezeReason | None:
        """Return the reason why the state does not count; None if it counts."""
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
        """Return the state, None if any evidence is against it."""
        return None if self.doubt(now_ns) else self.state
