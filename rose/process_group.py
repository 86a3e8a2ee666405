"""A process and all that it started: one group, ended as a whole."""

import asyncio
import os
import signal
from abc import ABC, abstractmethod

from rose.placement import kill_group
from rose.procfs import ProcessIdentity, group_states

STOP_GRACE_S = 8.0
KILL_GRACE_S = 5.0
POLL_S = 0.02
UNKNOWN_EXIT = -1


class ProcessGroup(ABC):
    """A running process that leads a group of its own."""

    def __init__(self, leader: int) -> None:
        self._group = leader

    @property
    def pid(self) -> int:
        """Process id of the leader."""
        return self._group

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Exit status of the leader, None while it runs."""

    @abstractmethod
    async def wait(self) -> int:
        """Exit status of the leader, once it has ended."""

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the whole group: TERM, a grace period, KILL. Returns when nothing of it is left."""
        self._signal_group(signal.SIGTERM)
        if not await self._gone(grace_s):
            await self.kill()

    async def kill(self) -> None:
        """End the whole group at once."""
        kill_group(self._group)
        self._signal_group(signal.SIGKILL)  # whatever was started meanwhile
        await self._gone(KILL_GRACE_S)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._group, number)
        except ProcessLookupError:
            return

    async def _gone(self, patience_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + patience_s
        while group_alive(self._group):
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        await self.wait()
        return True


class AdoptedProcess(ProcessGroup):
    """One that somebody else started: it can be watched and ended, its exit status is not ours."""

    def __init__(self, identity: ProcessIdentity) -> None:
        super().__init__(identity.pid)
        self._identity = identity

    @property
    def returncode(self) -> int | None:
        """None while it runs, UNKNOWN_EXIT afterwards."""
        return None if self._identity.running else UNKNOWN_EXIT

    async def wait(self) -> int:
        """UNKNOWN_EXIT, once it has ended."""
        while self._identity.running:  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(POLL_S)
        return UNKNOWN_EXIT


def group_alive(group: int) -> bool:
    """True while the group holds a process that is no zombie."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return bool(group_states(group))
