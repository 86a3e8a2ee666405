"""Harvest switch of a node: the operator's modes as the scheduler last told them."""

import time
from collections.abc import Callable

from rose.rpc import rose_pb2


class HarvestSwitch:
    """Modes as told: one of the cluster, and stricter ones of single replicas.

    Until a scheduler spoke nothing may be lent, so no guest is started either; one that an earlier
    daemon left running stays, frozen. A scheduler that falls silent changes nothing: leases end by
    themselves.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._off_since_s: dict[str, float] = {}
        self._cluster = rose_pb2.HARVEST_MODE_UNSPECIFIED
        self._own: dict[str, rose_pb2.HarvestMode.ValueType] = {}

    def take(self, command: rose_pb2.Harvest) -> None:
        """Learn a mode. That of the cluster comes first and forgets those of single replicas."""
        if command.replica:
            self._own[command.replica] = command.mode
        else:
            self._cluster = command.mode
            self._own.clear()
        # A stop that is over for a moment begins anew, whoever looks when.
        for replica in list(self._off_since_s):
            self.off(replica)

    @property
    def known(self) -> bool:
        """True if a scheduler has set a mode since this daemon started."""
        return self._cluster != rose_pb2.HARVEST_MODE_UNSPECIFIED

    def off(self, replica: str) -> bool:
        """Return True if the guest must not exist at all."""
        barred = rose_pb2.HARVEST_MODE_OFF
        off = barred in (self._cluster, self._own.get(replica))
        if off:
            self._off_since_s.setdefault(replica, self._clock_s())
        else:
            self._off_since_s.pop(replica, None)
        return off

    def off_since_s(self, replica: str) -> float:
        """Since when the guest has not been allowed to exist, which tells stops apart; else 0."""
        return self._off_since_s.get(replica, 0.0) if self.off(replica) else 0.0

    def off_s(self, replica: str) -> float:
        """Return the seconds for which `off` has been true; 0 while the guest may exist."""
        since_s = self._off_since_s.get(replica)
        return self._clock_s() - since_s if self.off(replica) and since_s is not None else 0.0
