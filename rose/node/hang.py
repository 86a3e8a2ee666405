"""A guest that lives and does nothing any more: without a core, stopped, or stuck for too long."""

import time
from collections.abc import Callable

from executor import GuestState
from rose.procfs import STOPPED, ProcessIdentity, find_in_group, group_states

# A guest runs behind everybody else, so a busy host alone may silence it for a while.
SILENT_S = 2.0
STUCK_S = 60.0
# vLLM's engine cores call themselves so.
CORE = "VLLM::EngineCor"
_NS = 1e9


class HangWatch:
    """Judges by the heartbeat that the guest's watchdog writes, and by what /proc says."""

    def __init__(
        self, guest: Callable[[], GuestState | None], group: Callable[[], int | None]
    ) -> None:
        self._guest = guest
        self._group = group
        self._watched: int | None = None
        self._core: ProcessIdentity | None = None

    def reason(self) -> str | None:
        """Why the guest is to be ended, None while it is well."""
        guest, group = self._guest(), self._group()
        if guest is None or group is None:
            return None
        if self._core_ended(group):
            return "its engine core is dead"
        silent_s = (time.monotonic_ns() - guest.heartbeat_ns) / _NS
        if silent_s > STUCK_S:
            return f"no sign of life for {STUCK_S:.0f} s"
        if silent_s > SILENT_S and STOPPED in group_states(group):
            return f"stopped (SIGSTOP) for {SILENT_S:.0f} s"
        return None

    def _core_ended(self, group: int) -> bool:
        """Whether the core that was seen in the group is gone: the rest takes seconds to notice."""
        if group != self._watched:
            self._watched, self._core = group, None
        if self._core is None:
            self._core = find_in_group(group, CORE)
            return False
        return not self._core.running
