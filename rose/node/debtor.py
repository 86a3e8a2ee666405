"""What is done about a guest that keeps memory which its host took back."""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rose.node.placed import weigh
from rose.placement import Share, lower_group, raise_group

logger = logging.getLogger("rose.node")
REFUSED = (
    "a guest that owes memory stays behind its busy host, and may be killed for it: allow this user"
    " to raise processes (CAP_SYS_NICE, or RLIMIT_NICE of 20)"
)


def _nothing(_: int) -> None:
    return


class Debtor:
    """First it gets a core: behind a busy host it may wait for seconds before it can give at all.

    That it gets the core for nothing else is up to the caller, who keeps it frozen meanwhile.
    """

    def __init__(
        self,
        group: Callable[[], int | None] = lambda: None,
        cgroup: Path | None = None,
        overdue: Callable[[int], object] = _nothing,
        share: Share = "background",
    ) -> None:
        """`group`: its process group, None while it has none. `overdue` begins the ladder.

        `share`: where it belongs when it is not pressed.
        """
        self.overdue = overdue
        self._group = group
        self._cgroup = cgroup
        self._share = share
        self._raised: int | None = None
        self._refused = False

    def press(self, pressed: bool) -> None:
        """Put it among the normal processes, or back behind all others; any number of times."""
        group = self._group() if pressed else None
        if group == self._raised:
            return
        if self._raised is not None:
            lower_group(self._raised, self._share)
        if group is not None and not raise_group(group) and not self._refused:
            self._refused = True
            logger.warning(REFUSED)
        if self._cgroup:
            # Where it may not, the classes inside are all there is, as at the start.
            with suppress(OSError):
                weigh(self._cgroup, self._share if group is None else None)
        self._raised = group
