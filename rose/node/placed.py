"""Where a process ended up below all others: read back from the kernel, not from what was asked."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.errors import RoseError
from rose.placement import Share

IDLE, NICE, PLAIN = "SCHED_IDLE", "nice", "plain"


class CgroupRefusedError(RoseError):
    """The operator's cgroup folder cannot be used."""


@dataclass(frozen=True, slots=True)
class Placed:
    """`share`: IDLE, NICE or PLAIN. `cgroup`: its cgroup v2 path, empty where there is none."""

    share: str
    cgroup: str
    oom_score_adj: int

    @classmethod
    def of(cls, pid: int) -> "Placed | None":
        """None when the process is gone."""
        try:
            idle = os.sched_getscheduler(pid) == os.SCHED_IDLE
            nice = os.getpriority(os.PRIO_PROCESS, pid) > 0
            oom = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return None
        unified = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
        return cls(IDLE if idle else NICE if nice else PLAIN, unified, oom)


# As cgroup v2 counts: 100 is a group like any other.
_WEIGHTS: Mapping[Share | None, str] = {"background": "1", "aside": "10", None: "100"}


def weigh(group: Path, share: Share | None) -> None:
    """Its place in line for the CPU, None that of any group. Raises OSError where it may not."""
    idle = share == "background"
    if (group / "cpu.idle").exists():
        (group / "cpu.idle").write_text("1" if idle else "0")
        if idle:
            return
    (group / "cpu.weight").write_text(_WEIGHTS[share])


def guest_cgroup(parent: Path, guest: str, share: Share = "background") -> Path:
    """Make the guest's cgroup below the delegated folder `parent`, behind others for the CPU.

    Inside a cgroup SCHED_IDLE counts against its own members only: beside a host in another one it
    is the group's weight that decides. Raises CgroupRefusedError with what to do.
    """
    group = parent / guest
    try:
        control = parent / "cgroup.subtree_control"
        if "cpu" not in control.read_text().split():
            control.write_text("+cpu")
        group.mkdir(exist_ok=True)
        weigh(group, share)
    except OSError as error:
        raise CgroupRefusedError(
            f"cgroup {group} cannot be used ({error.strerror}): delegate a cgroup v2 folder with"
            " the cpu controller to this user and name it in `cgroup`, or leave `cgroup` out"
        ) from error
    return group
