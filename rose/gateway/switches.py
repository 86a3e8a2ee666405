"""How long a newly leased replica takes to its first token, as turns feel it.

    leased -- catches up -- usable -- no turn is sent there -- first attempt -- first token
      |------ counts ---------|             does not             |------ counts ------|

Attempts that are refused until the node has opened the replica count, with the short rests between.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rose.gateway.table import ReplicaEntry

# A longer gap between two attempts is the router's choice, not the replica's slowness.
GAP_S = 1.0


@dataclass(frozen=True, slots=True)
class Switch:
    """The replica gave its first token `took_s` after the lease `epoch`, idle time left out."""

    replica: str
    epoch: int
    took_s: float


@dataclass(slots=True)
class _Opening:
    epoch: int
    leased_s: float
    usable_s: float | None = None
    tried_s: float | None = None
    live: int = 0
    ended_s: float = 0.0


class SwitchClock:
    """Leases whose first token is awaited, and those measured. Times are monotonic, handed in."""

    def __init__(self) -> None:
        # The lease of each row of the last table, 0 where there was none.
        self._epochs: dict[str, int] = {}
        self._openings: dict[str, _Opening] = {}
        self._measured: dict[str, Switch] = {}

    @property
    def awaiting(self) -> bool:
        """Whether any token could be the first of its lease."""
        return bool(self._openings)

    @property
    def measured(self) -> list[Switch]:
        """The newest of each replica that nobody was told of."""
        return list(self._measured.values())

    def told(self, replica: str, epoch: int) -> None:
        """The scheduler has this one."""
        known = self._measured.get(replica)
        if known is not None and known.epoch == epoch:
            del self._measured[replica]

    def set_table(self, entries: Iterable[ReplicaEntry], now_s: float) -> None:
        """A new table; of leases in the first one after none, nobody knows how old they are."""
        blind, before = not self._epochs, self._openings
        epochs: dict[str, int] = {}
        self._openings = {}
        for entry in entries:
            epoch = epochs[entry.id] = entry.lease_epoch if entry.leased else 0
            opening = before.get(entry.id)
            if opening is None or opening.epoch != epoch:
                if blind or not epoch or self._epochs.get(entry.id, 0) == epoch:
                    continue
                opening = _Opening(epoch, now_s)
            self._openings[entry.id] = opening
            if entry.healthy and opening.usable_s is None:
                opening.usable_s = now_s
        self._epochs = epochs

    def tried(self, replica: str, now_s: float) -> None:
        """A turn was sent to the replica."""
        opening = self._openings.get(replica)
        if opening is None:
            return
        if opening.tried_s is None:
            opening.tried_s = now_s
        elif not opening.live and now_s > opening.ended_s + GAP_S:
            opening.tried_s += now_s - opening.ended_s
        opening.live += 1

    def ended(self, replica: str, epoch: int, now_s: float) -> None:
        """A turn left the replica."""
        opening = self._openings.get(replica)
        if opening is not None and opening.epoch == epoch:
            opening.live -= 1
            opening.ended_s = now_s

    def token(self, replica: str, epoch: int, now_s: float) -> None:
        """A token came under the lease `epoch`."""
        opening = self._openings.get(replica)
        if opening is None or opening.epoch != epoch or opening.tried_s is None:
            return
        del self._openings[replica]
        ready_s = opening.leased_s if opening.usable_s is None else opening.usable_s
        took_s = ready_s - opening.leased_s + now_s - opening.tried_s
        self._measured[replica] = Switch(replica, epoch, took_s)
