"""Whether the process that writes as the host is one that runs, and the one that was meant."""

from typing import Final

from executor import SeatState
from executor.guard import HOST_DEAD, HOST_FOREIGN
from rose.procfs import ProcessIdentity, ProcessStat, pid_namespace

_MOST_ANCESTORS: Final = 64


class HostProcess:
    """The host's process, told apart from a later one of its number.

    Numbers are hints: what they cannot say, because the host has a process namespace of its own or
    /proc hides it, is left to the lock on the page. What they do say against a host counts.
    """

    def __init__(self, pid: int | None) -> None:
        """`pid`: of the host's first process, or None; pinned now."""
        self._pid = pid
        self._identity = None if pid is None else ProcessIdentity.of(pid)
        self._own_namespace = pid_namespace()
        self._judged: tuple[int, int] | None = None
        self._foreign = False

    @property
    def ended(self) -> bool:
        """Whether a process was named and is gone; a reused number does not bring it back."""
        return self._pid is not None and (self._identity is None or not self._identity.running)

    def doubt(self, seat: SeatState | None) -> str | None:
        """HOST_DEAD, HOST_FOREIGN, or None where nothing speaks against who holds the seat."""
        if self.ended:
            return HOST_DEAD
        if seat is None or not seat.started or seat.pid_namespace != self._own_namespace:
            return None
        stat = ProcessStat.of(seat.pid)
        if stat is None or stat.ended or stat.started != seat.started:
            # A child of a dead host may hold on to its lock.
            return HOST_DEAD
        writer = seat.pid, seat.started
        if writer != self._judged:
            self._judged, self._foreign = writer, not self._begot(seat.pid)
        return HOST_FOREIGN if self._foreign else None

    def _begot(self, pid: int) -> bool:
        """Whether the process is the named one, or came from it: an engine core has a parent."""
        if self._pid is None:
            return True
        for _ in range(_MOST_ANCESTORS):
            if pid == self._pid:
                return True
            stat = ProcessStat.of(pid)
            if stat is None or stat.parent <= 1:
                return False
            pid = stat.parent
        return False
