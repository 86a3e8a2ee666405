"""Harvest modes: which guests may be lent, and the effect on their leases.

The operator's stop is one of the cluster and stricter ones of single replicas; a capacity policy's
verdict on a node is one too (`elastic_scheduler.capacity.gate`), and the stricter holds.

| mode | new leases of guests | live leases of guests |
| --- | --- | --- |
| ACTIVE | granted | renewed |
| HOLD | none | renewed |
| HOLD_AND_DRAIN | none | released |
| OFF | none | released; the node ends its guests |

Dedicated replicas belong to the jobs, not to the operator of a serving cluster: they are leased in
every mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from elastic_scheduler.leases.lease_table import Lease, Offer


class HarvestMode(StrEnum):
    """Mode of lending, from nothing to all offers."""

    OFF = "off"
    HOLD_AND_DRAIN = "hold_and_drain"
    HOLD = "hold"
    ACTIVE = "active"


_STRICTEST_FIRST = tuple(HarvestMode)


def stricter(one: HarvestMode, other: HarvestMode) -> HarvestMode:
    """Return the mode of the two that lends less."""
    # Called for every replica at every turn, and mostly nothing is against lending.
    if one is other or other is HarvestMode.ACTIVE:
        return one
    if one is HarvestMode.ACTIVE:
        return other
    return min(one, other, key=_STRICTEST_FIRST.index)


@dataclass(frozen=True, slots=True)
class HarvestPlan:
    """Changes that follow from the modes now.

    A lease in no field is being released, or has no live offer and runs out.
    """

    lease: tuple[Offer, ...]
    renew: tuple[Lease, ...]
    release: tuple[Lease, ...]


class HarvestModes:
    """The operator's stop: the cluster's mode and those of single replicas; the stricter holds.

    Stricter wins so that a forgotten permission for one replica never defeats a cluster-wide stop.
    """

    def __init__(
        self,
        mode: HarvestMode = HarvestMode.ACTIVE,
        overrides: Mapping[str, HarvestMode] | None = None,
    ) -> None:
        self.mode = mode
        self._overrides = dict(overrides or {})

    @property
    def overrides(self) -> dict[str, HarvestMode]:
        """Modes of single replicas, as set."""
        return dict(self._overrides)

    def set_mode(self, mode: HarvestMode, replica: str | None = None) -> None:
        """Set the cluster's mode, or that of one replica; ACTIVE for a replica clears its entry."""
        if replica is None:
            self.mode = mode
        elif mode is HarvestMode.ACTIVE:
            self._overrides.pop(replica, None)
        else:
            self._overrides[replica] = mode

    def mode_of(self, replica: str) -> HarvestMode:
        """Return the mode that holds for a guest."""
        own = self._overrides.get(replica)
        return self.mode if own is None else stricter(self.mode, own)
