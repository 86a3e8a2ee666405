"""CPU placement of a guest: its low priority, read back, and a boost while it owes memory.

`CpuPlacement` is read back from the kernel, because a request to lower a priority can fail
silently. `CpuBoost` gives a core to a guest that keeps KV memory which its host took back, so that
it can return it.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rose.errors import RoseError
from rose.process.launcher import Share, lower_group, raise_group

IDLE, NICE, PLAIN = "SCHED_IDLE", "nice", "plain"


class CgroupRefusedError(RoseError):
    """Error raised when the operator's cgroup folder cannot be used for guests."""


@dataclass(frozen=True, slots=True)
class CpuPlacement:
    """CPU placement of a process as the kernel reports it. `share`: IDLE, NICE or PLAIN; `cgroup`:
    its cgroup v2 path, "" without one.
    """

    share: str
    cgroup: str
    oom_score_adj: int

    @classmethod
    def of(cls, pid: int) -> "CpuPlacement | None":
        """Return the placement of a process read from /proc, None if the process is gone."""
        try:
            idle = os.sched_getscheduler(pid) == os.SCHED_IDLE
            nice = os.getpriority(os.PRIO_PROCESS, pid) > 0
            oom = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return None
        unified = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
        return cls(IDLE if idle else NICE if nice else PLAIN, unified, oom)


# Weights of cgroup v2, whose default is 100.
_WEIGHTS: Mapping[Share | None, str] = {"background": "1", "aside": "10", None: "100"}


def weigh(group: Path, share: Share | None) -> None:
    """Set a cgroup's CPU weight for a share; None sets the default weight. Raises OSError without
    permission.
    """
    idle = share == "background"
    if (group / "cpu.idle").exists():
        (group / "cpu.idle").write_text("1" if idle else "0")
        if idle:
            return
    (group / "cpu.weight").write_text(_WEIGHTS[share])


def guest_cgroup(parent: Path, guest: str, share: Share = "background") -> Path:
    """Create the guest's cgroup in the delegated folder `parent`, with a low CPU weight, and return
    its path.

    SCHED_IDLE works only among members of one cgroup: against a host in another one the group's
    weight decides. Raises CgroupRefusedError, which says what to do.
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


logger = logging.getLogger("rose.node")
REFUSED = (
    "a guest that owes memory stays behind its busy host, and may be killed for it: allow this user"
    " to raise processes (CAP_SYS_NICE, or RLIMIT_NICE of 20)"
)


class CpuBoost:
    """Temporary CPU priority of a guest that owes KV memory to its host.

    Behind a busy host a guest may wait seconds for a core before it can return memory. The caller
    keeps it frozen meanwhile, so that it uses the core for nothing else.
    """

    def __init__(
        self,
        cgroup: Path | None = None,
        share: Share = "background",
    ) -> None:
        """Keep the guest's cgroup, None without one, and the CPU share that it has without
        a boost.
        """
        self._cgroup = cgroup
        self._share = share
        self._raised: int | None = None
        self._refused = False

    def set(self, group: int | None) -> None:
        """Give the process group `group` normal CPU priority; None gives the boosted group its low
        share again. A missing permission is logged once.
        """
        if group == self._raised:
            return
        if self._raised is not None:
            lower_group(self._raised, self._share)
        if group is not None and not raise_group(group) and not self._refused:
            self._refused = True
            logger.warning(REFUSED)
        if self._cgroup:
            # Without permission the scheduling classes inside the group must suffice.
            with suppress(OSError):
                weigh(self._cgroup, self._share if group is None else None)
        self._raised = group
