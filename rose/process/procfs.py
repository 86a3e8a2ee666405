"""Processes in /proc: identity across reused numbers, groups, and the memory of a group."""

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The kernel numbers its first process namespace so on every machine (PROC_PID_INIT_INO).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
STOPPED, ZOMBIE, DEAD = "T", "Z", "X"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/PID/stat that ROSE looks at; `started` in clock ticks since boot.

    `name`: as the process calls itself, cut to 15 characters by the kernel.
    """

    name: str
    state: str
    parent: int
    group: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """None when there is no such process, or none that this user may see."""
        try:
            raw = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        # The program's name stands in parentheses and may contain anything, these included.
        head, _, tail = raw.rpartition(")")
        fields = tail.split()
        return cls(
            name=head.partition("(")[2],
            state=fields[0],
            parent=int(fields[1]),
            group=int(fields[2]),
            started=int(fields[19]),
        )

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more, though nobody may have collected it."""
        return self.state in (ZOMBIE, DEAD)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process for all time: numbers repeat, start times within a boot do not."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """None when there is no such process."""
        stat = ProcessStat.of(pid)
        return None if stat is None or stat.ended else cls(pid, stat.started, boot_id())

    @property
    def running(self) -> bool:
        """Whether this very process still runs (a stopped one does)."""
        return ProcessIdentity.of(self.pid) == self


def boot_id() -> str:
    """Differs after every boot."""
    return _BOOT_ID.read_text().strip()


def in_first_pid_namespace() -> bool:
    """Whether process numbers here are those that the kernel and drivers count by."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def pid_namespace() -> int:
    """The inode that names the namespace in which processes are numbered here; 0 if unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def group_states(group: int) -> list[str]:
    """States of the group's processes, those that only wait to be collected left out."""
    return [stat.state for _, stat in group_members(group)]


def find_in_group(group: int, name: str) -> ProcessIdentity | None:
    """A running process of the group whose name begins so."""
    found = (pid for pid, stat in group_members(group) if stat.name.startswith(name))
    return next((identity for pid in found if (identity := ProcessIdentity.of(pid))), None)


def group_members(group: int) -> list[tuple[int, ProcessStat]]:
    """Process ids and stats of the group, those that only wait to be collected left out."""
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    stats = ((pid, stat) for pid in pids if (stat := ProcessStat.of(pid)))
    return [(pid, stat) for pid, stat in stats if stat.group == group and not stat.ended]


def group_bytes(group: int) -> int | None:
    """Memory that is gone when the group is: resident bytes, shared ones in proportion.

    0 when nothing of the group is left, None when the kernel does not say.
    """
    total = 0
    for pid, _ in group_members(group):
        try:
            total += _pss_bytes(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended meanwhile.
        except OSError:
            return None
    return total


def group_cpu_s(group: int) -> float:
    """Processor time that the group's living processes have used."""
    total = 0.0
    for pid, _ in group_members(group):
        with contextlib.suppress(OSError, psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def _pss_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    if not rollup.exists():
        # Kernels without it: what is mapped from files may be shared, and is left out.
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * mmap.PAGESIZE
    for line in rollup.read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0  # A process without memory of its own is about to end.
