"""Processes in /proc: identity across reused numbers, groups, memory of a group, open ports."""

import contextlib
import mmap
import os
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Self

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The kernel gives its first process namespace this number on every machine (PROC_PID_INIT_INO).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
STOPPED, ZOMBIE, DEAD = "T", "Z", "X"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """Fields of /proc/PID/stat; `started` in clock ticks since boot.

    name: the process's own name, cut to 15 characters by the kernel.
    """

    name: str
    state: str
    parent: int
    group: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the fields of a process; None if there is none, or none that this user may see."""
        try:
            raw = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        # The program's name stands in parentheses and may contain any character, parentheses too.
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
        """True if the process no longer runs, even if its parent has not collected it."""
        return self.state in (ZOMBIE, DEAD)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of a process that a reused number does not match: number, start time and boot."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the identity of the process with this number; None if there is none."""
        stat = ProcessStat.of(pid)
        return None if stat is None or stat.ended else cls(pid, stat.started, boot_id())

    @property
    def running(self) -> bool:
        """True while this very process runs or is stopped."""
        return ProcessIdentity.of(self.pid) == self


def boot_id() -> str:
    """Return the kernel's id of the present boot, which differs after every boot."""
    return _BOOT_ID.read_text().strip()


def in_first_pid_namespace() -> bool:
    """Return True in the first PID namespace, where process numbers are the kernel's.

    False if unknown.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def pid_namespace() -> int:
    """Return the inode number of this process's PID namespace; 0 if unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def group_states(group: int) -> list[str]:
    """Return the state letters (/proc) of the group's processes, without zombies."""
    return [stat.state for _, stat in group_members(group)]


def named_in_group(group: int, names: Collection[str]) -> dict[ProcessIdentity, str]:
    """Return the running processes of the group whose name begins with one of `names`, with it."""
    found = (
        (ProcessIdentity.of(pid), name)
        for pid, stat in group_members(group)
        for name in names
        if stat.name.startswith(name)
    )
    return {identity: name for identity, name in found if identity is not None}


def group_members(group: int) -> list[tuple[int, ProcessStat]]:
    """Return process ids and stats of the group, without zombies."""
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    stats = ((pid, stat) for pid in pids if (stat := ProcessStat.of(pid)))
    return [(pid, stat) for pid, stat in stats if stat.group == group and not stat.ended]


def group_bytes(group: int) -> int | None:
    """Return the memory that the group's end would free: resident bytes, shared ones in proportion.

    0 if no process of the group is left, None if the kernel does not say.
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
    """Return the processor seconds of the group's living processes, added up.

    Those of children that ended are not counted.
    """
    total = 0.0
    for pid, _ in group_members(group):
        with contextlib.suppress(OSError, psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def exposed_at(port: int) -> str | None:
    """Return an address at which other machines reach the TCP port of this one; None if none.

    An engine has to listen on loopback alone: it checks no certificate.
    """
    for connection in psutil.net_connections("tcp"):
        local = connection.laddr
        if local and local.port == port and connection.status == psutil.CONN_LISTEN:
            address = ip_address(local.ip)
            mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
            if not (mapped or address).is_loopback:
                return str(mapped or address)
    return None


def _pss_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    if not rollup.exists():
        # Kernels without smaps_rollup: pages mapped from files may be shared, and are left out.
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * mmap.PAGESIZE
    for line in rollup.read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0  # A process without memory of its own is about to end.
