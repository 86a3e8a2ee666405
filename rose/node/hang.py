"""A guest that lives and does nothing any more: stopped, or stuck beyond what load explains."""

import time
from collections.abc import Callable

from executor import GuestState
from rose.procfs import STOPPED, group_states

# A guest runs behind everybody else, so a busy host alone may silence it for a while.
SILENT_S = 2.0
STUCK_S = 60.0
_NS = 1e9


class HangWatch:
    """Judges by the heartbeat that the guest's watchdog writes, and by what /proc says."""

    def __init__(
        self, guest: Callable[[], GuestState | None], group: Callable[[], int | None]
    ) -> None:
        self._guest = guest
        self._group = group

    def reason(self) -> str | None:
        """Why the guest is to be ended, None while it is well."""
        guest, group = self._guest(), self._group()
        if guest is None or group is None:
            return None
        silent_s = (time.monotonic_ns() - guest.heartbeat_ns) / _NS
        if silent_s > STUCK_S:
            return f"no sign of life for {STUCK_S:.0f} s"
        if silent_s > SILENT_S and STOPPED in group_states(group):
            return f"stopped (SIGSTOP) for {SILENT_S:.0f} s"
        return None
