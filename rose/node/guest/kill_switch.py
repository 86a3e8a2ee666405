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
# Interval at which a thread looks for a file on a disk, and time without an answer after which the
# disk counts as hung.
LOOK_EVERY_S = 0.05
ANSWER_S = 1.0


class KillSwitch:
    """Kill switch of a node: set while its file exists, or since `engage` was called. Keepers of
    guests watch the file too.

    A file on a disk is watched by a thread, so that no caller waits for the disk; a file in memory
    is looked for by each call.
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
        """True if the switch is set, so that no guest may exist."""
        return self._latched or (self._seen if self._watched else self.file.exists())

    def checked(self) -> bool:
        """Return `engaged`. Raises OSError if the disk of the file has not answered for
        ANSWER_S.
        """
        engaged = self.engaged
        if not engaged and self._watched and self._clock_s() - self._answered_s > ANSWER_S:
            raise OSError(errno.ETIMEDOUT, "the disk does not answer", str(self.file))
        return engaged

    def engage(self) -> None:
        """Set the switch by creating its file; if the file cannot be written, set it in memory
        until this process ends.
        """
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
# Default `reclaimDeadline` of capacity policies.
DEADLINE_S = 5.0
POLL_S = 0.01
DUTY_WINDOW_S = 0.1


@dataclass(frozen=True, slots=True)
class EndedGuest:
    """Measured end of one guest.

    seconds: from the order until the last measurement. gone: True if no process is left.
    held_before, held: bytes that its processes held before and hold now, None if unknown. duty:
    share of a core that they use now. deadline_s: seconds in which all of it had to end.
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
        """True if every process and byte of the guest was gone by the deadline."""
        return self.gone and not self.held and self.seconds <= self.deadline_s

    @property
    def outcome(self) -> str:
        """Measured result in one line for an operator, with the command to run if the guest still
        runs.
        """
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
    """Result of ending all guests of a node; `barred`: True if the kill switch keeps new ones from
    starting.
    """

    guests: tuple[EndedGuest, ...]
    barred: bool


def end_guests(run_dir: Path, kill_file: Path, deadline_s: float = DEADLINE_S) -> KillReport:
    """Set the kill file, wait until every guest of the node has ended, kill with SIGKILL those that
    have not, and return what was measured.

    If the file cannot be written, the daemon is signalled instead; without a daemon the guests are
    killed at once, and only a daemon that starts later could start new ones. A repeated call is
    safe.
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
    """Return the process group ids of a node's running guests by name, including groups without a
    record whose keeper watches this kill file.
    """
    groups = {name: each.identity.pid for name, each in running_guests(run_dir).items()}
    for group in _kept_groups(kill_file) - set(groups.values()):
        groups[f"guest without a record {group}"] = group
    return groups


def _kept_groups(kill_file: Path) -> set[int]:
    """Return the ids of the process groups that have a process with this kill file on its command
    line.
    """
    wanted, found = kill_file.resolve(), set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for word in Path("/proc", pid, "cmdline").read_bytes().split(b"\0"):
                option, _, value = os.fsdecode(word).partition("=")
                if option == "kill_file" and Path(value).resolve() == wanted:
                    found.add(os.getpgid(int(pid)))
    return found


def _restore(run_dir: Path, guest: int) -> None:
    """Create the run folder again if it was removed while the guest runs, with the guest's user as
    owner, because daemon and keeper look for the kill file there.
    """
    with contextlib.suppress(OSError):
        owner = Path("/proc", str(guest)).stat()
        run_dir.mkdir(mode=0o700)
        os.chown(run_dir, owner.st_uid, owner.st_gid)


def _order(run_dir: Path, kill_file: Path) -> bool:
    """Create the kill file, or signal the daemon if that fails; return False if neither is
    possible.
    """
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
    """Return the share of a core's time that the group's processes use, measured over
    DUTY_WINDOW_S; the call takes that long.
    """
    began_s, began = time.monotonic(), group_cpu_s(group)
    time.sleep(DUTY_WINDOW_S)
    return max(0.0, group_cpu_s(group) - began) / (time.monotonic() - began_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement of a guest, the input of StopProof.

    barred: True if the guest must not exist. held_bytes: None if it could not be measured. duty:
    share of the last second in which it ran. deadline_s: seconds that the stop may take. order_s:
    time of the stop order, which tells one stop from the next.
    """

    barred: bool
    held_bytes: int | None
    duty: float
    deadline_s: float
    order_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Said:
    """Record for the node's event log, returned by StopProof: name and fields of the event."""

    event: str
    fields: Mapping[str, object]


class StopProof:
    """State machine that proves that a guest which must not exist holds no memory and does not run;
    the caller passes the clock's time.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._order_s = 0.0
        self._proved = False
        self._overdue = False

    def step(self, seen: Measured, now_s: float) -> list[Said]:
        """Return the events to log for a measurement: `stop_proved` once when memory and duty are
        0, `stop_overdue` once after the deadline, else none.
        """
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
