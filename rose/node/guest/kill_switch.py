"""Ends of guests: the kill switch, and the proof that a guest which must not exist does nothing.

kill file ──► keepers and the daemon end the guests ──► still there after a while? SIGKILL

The switch is a file, so that it holds across restarts and without a daemon. `end_guests` ends a
node's guests from outside, with the daemon alive, stopped or dead, and measures that they are gone:
bytes that their processes hold, and time that they use. A signal does the same: SIGUSR1 to the
daemon sets the file, SIGUSR1 to a guest's process group wakes its keeper, which ends the group.

`StopProof` records a stop as measured; whoever gave the order (scheduler, file, signal) reads the
same two events:

    barred ──► held bytes and duty are 0 ──► proved, with its seconds
       └─────► the deadline passes first ──► overdue, with what is left; proved when it is gone
    allowed ─► begins anew
"""

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from executor.control_page.page import on_disk
from rose.node.guest.guest_record import running_guests
from rose.process.child import group_alive
from rose.process.filelock import holder_of
from rose.process.launcher import kill_group
from rose.process.procfs import group_bytes, group_cpu_s

KILLED = "kill switch"
# On a disk a thread looks for the file so often; no answer for so long counts as a disk that hangs.
LOOK_EVERY_S = 0.05
ANSWER_S = 1.0


class KillSwitch:
    """Set while the file exists. Keepers of guests look for it too, with or without a daemon.

    Only a file in memory is looked for by the caller: no caller ever waits for a disk.
    """

    def __init__(self, file: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.file = file
        self._clock_s = clock_s
        self._latched = False
        self._watched = on_disk(file.parent)
        self._seen, self._answered_s = False, clock_s()
        if self._watched:
            threading.Thread(target=self._watch, name="rose-kill-file", daemon=True).start()

    @property
    def engaged(self) -> bool:
        """True while no guest may exist."""
        return self._latched or (self._seen if self._watched else self.file.exists())

    def checked(self) -> bool:
        """Return `engaged`. Raises OSError where the file's disk has not answered for a while."""
        engaged = self.engaged
        if not engaged and self._watched and self._clock_s() - self._answered_s > ANSWER_S:
            raise OSError(errno.ETIMEDOUT, "the disk does not answer", str(self.file))
        return engaged

    def engage(self) -> None:
        """Set it. A disk that takes no file delays nothing: then it holds until the next start."""
        self._latched = True
        try:
            self.file.touch()
        except OSError:
            return
        self._seen, self._latched = True, False

    def _watch(self) -> None:
        while True:
            self._seen = self.file.exists()
            self._answered_s = self._clock_s()
            time.sleep(LOOK_EVERY_S)


PATIENCE_S = 1.0
# `reclaimDeadline` of a policy that does not say another.
DEADLINE_S = 5.0
POLL_S = 0.01
DUTY_WINDOW_S = 0.1


@dataclass(frozen=True, slots=True)
class EndedGuest:
    """Record of one guest's end, as measured; `seconds` from the order on.

    held_before, held: bytes of its processes, None when the kernel does not say. duty: share of a
    core's time that they use now. deadline_s: by when all of it was to be back.
    """

    name: str
    pid: int
    seconds: float
    gone: bool
    held_before: int | None = None
    held: int | None = None
    duty: float = 0.0
    deadline_s: float = DEADLINE_S

    @property
    def in_time(self) -> bool:
        """True if nothing of the guest was left by the deadline."""
        return self.gone and not self.held and self.seconds <= self.deadline_s

    @property
    def outcome(self) -> str:
        """The measured end in one line."""
        measured = f"{_size(self.held_before)} before, {_size(self.held)} now, duty {self.duty:.0%}"
        if self.gone:
            late = "" if self.in_time else f", later than {self.deadline_s:g} s"
            return f"is gone after {self.seconds:.2f} s{late}: {measured}"
        return (
            f"still runs after {self.seconds:.1f} s ({measured}); end it with"
            f" `kill -9 -{self.pid}` as root"
        )


def _size(amount: int | None) -> str:
    return "an unknown size" if amount is None else f"{amount / (1 << 20):.1f} MiB"


@dataclass(frozen=True, slots=True)
class KillReport:
    """All guests of a node that ran; `barred`: whether none starts again by itself."""

    guests: tuple[EndedGuest, ...]
    barred: bool


def end_guests(run_dir: Path, kill_file: Path, deadline_s: float = DEADLINE_S) -> KillReport:
    """Set the kill file and see every guest of the node gone. Again changes nothing.

    Where the file cannot be written the daemon is told by signal; without one the guests are killed
    from here all the same, and only a daemon that starts later could start them anew.
    """
    began_s = time.monotonic()
    guests = guest_groups(run_dir, kill_file)
    before = {name: group_bytes(pid) for name, pid in guests.items()}
    for pid in guests.values():
        _restore(run_dir, pid)
    barred = _order(run_dir, kill_file)
    patience_s = min(PATIENCE_S, deadline_s / 2) if barred else 0.0
    ended = []
    for name, pid in guests.items():
        gone = _end(pid, began_s + patience_s, began_s + deadline_s)
        seconds = time.monotonic() - began_s
        duty = 0.0 if gone else _duty(pid)
        held = group_bytes(pid)
        ended.append(EndedGuest(name, pid, seconds, gone, before[name], held, duty, deadline_s))
    return KillReport(tuple(ended), barred)


def guest_groups(run_dir: Path, kill_file: Path) -> dict[str, int]:
    """Return the process groups of a node's guests, those without a record included, by name."""
    groups = {name: each.identity.pid for name, each in running_guests(run_dir).items()}
    for group in _kept_groups(kill_file) - set(groups.values()):
        groups[f"guest without a record {group}"] = group
    return groups


def _kept_groups(kill_file: Path) -> set[int]:
    """Return the groups whose keeper has this kill file on its command line."""
    wanted, found = kill_file.resolve(), set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for word in Path("/proc", pid, "cmdline").read_bytes().split(b"\0"):
                option, _, value = os.fsdecode(word).partition("=")
                if option == "kill_file" and Path(value).resolve() == wanted:
                    found.add(os.getpgid(int(pid)))
    return found


def _restore(run_dir: Path, guest: int) -> None:
    """Make a run folder that was removed under its guest, for the guest's user alone.

    The daemon and the guest's keeper still look for the kill file there.
    """
    with contextlib.suppress(OSError):
        owner = Path("/proc", str(guest)).stat()
        run_dir.mkdir(mode=0o700)
        os.chown(run_dir, owner.st_uid, owner.st_gid)


def _order(run_dir: Path, kill_file: Path) -> bool:
    """Bar guests, by the file or else by the daemon; False when neither takes the order."""
    try:
        kill_file.touch()
    except OSError:
        daemon = holder_of(run_dir / "daemon.lock")
        if daemon is None:
            return False
        os.kill(daemon, signal.SIGUSR1)
    return True


def _end(pid: int, patient_until_s: float, deadline_s: float) -> bool:
    if _gone_by(pid, patient_until_s):
        return True
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill_group(pid)
        os.killpg(pid, signal.SIGKILL)
    return _gone_by(pid, deadline_s)


def _gone_by(pid: int, deadline_s: float) -> bool:
    while group_alive(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _duty(group: int) -> float:
    """Return the share of a core's time that the group's processes use."""
    began_s, began = time.monotonic(), group_cpu_s(group)
    time.sleep(DUTY_WINDOW_S)
    return max(0.0, group_cpu_s(group) - began) / (time.monotonic() - began_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """One look at a guest; held_bytes is None when nobody could measure.

    deadline_s: how long the stop may take. duty: share of the last second in which it ran. order_s:
    tells stops apart between which nobody looked.
    """

    barred: bool
    held_bytes: int | None
    duty: float
    deadline_s: float
    order_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Said:
    """An event for the node's log."""

    event: str
    fields: Mapping[str, object]


class StopProof:
    """State machine of one guest's stops; the clock is handed in."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._order_s = 0.0
        self._proved = False
        self._overdue = False

    def step(self, seen: Measured, now_s: float) -> list[Said]:
        """Return the records that a measurement calls for."""
        if not seen.barred or seen.order_s != self._order_s:
            self._since_s, self._proved, self._overdue = None, False, False
            self._order_s = seen.order_s
        if not seen.barred:
            return []
        if self._since_s is None:
            self._since_s = now_s
        if self._proved:
            return []
        took_s = now_s - self._since_s
        fields = {"held_bytes": seen.held_bytes, "duty": seen.duty, "seconds": took_s}
        if seen.held_bytes == 0 and seen.duty <= 0:
            self._proved = True
            return [Said("stop_proved", {**fields, "in_time": took_s <= seen.deadline_s})]
        if took_s > seen.deadline_s and not self._overdue:
            self._overdue = True
            return [Said("stop_overdue", {**fields, "deadline_s": seen.deadline_s})]
        return []
