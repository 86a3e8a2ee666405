"""What a process group really holds, as the kernel counts it."""

import mmap
from pathlib import Path

from rose.procfs import group_members


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
