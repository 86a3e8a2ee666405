"""Harvest switch of a node: the operator's modes as the scheduler last told them."""

from rose.rpc import rose_pb2


class HarvestSwitch:
    """Modes as told: one of the cluster, and stricter ones of single replicas.

    Until a scheduler spoke nothing may be lent, so no guest is started either; one that an earlier
    daemon left running stays, frozen. A scheduler that falls silent changes nothing: leases end by
    themselves.
    """

    def __init__(self) -> None:
        self._cluster = rose_pb2.HARVEST_MODE_UNSPECIFIED
        self._own: dict[str, rose_pb2.HarvestMode.ValueType] = {}

    def take(self, command: rose_pb2.Harvest) -> None:
        """Learn a mode. That of the cluster comes first and forgets those of single replicas."""
        if command.replica:
            self._own[command.replica] = command.mode
        else:
            self._cluster = command.mode
            self._own.clear()

    @property
    def known(self) -> bool:
        """Whether a scheduler has spoken since this daemon started."""
        return self._cluster != rose_pb2.HARVEST_MODE_UNSPECIFIED

    def off(self, replica: str) -> bool:
        """Whether the guest shall not exist at all."""
        barred = rose_pb2.HARVEST_MODE_OFF
        return barred in (self._cluster, self._own.get(replica))
