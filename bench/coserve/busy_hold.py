"""maxHostBusy in the benchmark: the capacity gate of a scheduler holds the guest of a busy host.

    host's busy counter ──> HostLoad, as of a node ──> CapacityGate, as of a scheduler ──> a lease

A load of the benchmark comes in pieces: one block for each arm of each round, with others between
them. A hold of a real host lives on under its load, so each load has a gate of its own, whose time
runs only while that load does. The first pieces are the tries of the calibration, with the host
alone: by the first measured block a host that is too busy is held, as one is that was busy before.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from elastic_scheduler import HarvestMode, HarvestModes
from elastic_scheduler.capacity import CapacityGate, CapacityNote, NodeFacts, policy_of
from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.node.host import HostLoad

NODE: Final = "bench"
# A node reports as often.
REPORT_S: Final = 0.5
OFF: Final = 1.0
_NS: Final = 1e9


def limit_of(share: float) -> MaxHostBusy | None:
    """Return the policy's limit at this share with its usual hysteresis, None at 1."""
    if share >= OFF:
        return None
    usual = MaxHostBusy()
    return MaxHostBusy(share=share, resume=round(share * usual.resume / usual.share, 3))


def gate_of(limit: MaxHostBusy) -> CapacityGate:
    """Return a gate whose one policy lends everything except beside a busy host."""
    said: dict[str, Any] = {
        "name": NODE,
        "mode": "Active",
        "maxHostBusy": limit.model_dump(mode="json", by_alias=True),
        "sloBudget": None,
    }
    return CapacityGate(HarvestModes(HarvestMode.ACTIVE), [policy_of(said)])


@dataclass(slots=True)
class _Load:
    """Gate of one load, and the seconds that the load has run for."""

    gate: CapacityGate
    now_s: float = 0.0
    reported_s: float = -math.inf
    # A node's meter, in the load's own time.
    meter: HostLoad = field(init=False)

    def __post_init__(self) -> None:
        self.meter = HostLoad(lambda: round(self.now_s * _NS))


class HostBusyHold:
    """Decision whether the guest is lent beside its host now. Times are handed in.

    limit: None lends always.
    """

    def __init__(
        self, limit: MaxHostBusy | None, say: Callable[[CapacityNote], None] = lambda note: None
    ) -> None:
        self._limit = limit
        self._say = say
        self._loads: dict[str, _Load] = {}
        self._load: _Load | None = None
        self._seen_s: float | None = None

    def begin(self, load: str) -> None:
        """Give the host this load from now on."""
        if self._limit is None:
            return
        self._seen_s = None
        if load not in self._loads:
            self._loads[load] = _Load(gate_of(self._limit))
        self._load = self._loads[load]
        # The host's counter went on under other loads.
        self._load.meter.busy_share(None)

    def end(self) -> None:
        """Take the load away: without a load that counts the guest is lent."""
        self._load = None

    def lends(self, busy_ns: int | None, now_s: float) -> bool:
        """Read the host's counter, judge at each report, and return True if the guest is lent."""
        load = self._load
        if load is None:
            return True
        load.now_s += 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        if load.now_s >= load.reported_s + REPORT_S:
            load.reported_s = load.now_s
            share = load.meter.busy_share(busy_ns)
            load.gate.heard(NODE, share, 0, 0, load.now_s, lends=True)
        for act in load.gate.judge(lambda: [NodeFacts(NODE)], load.now_s):
            if isinstance(act, CapacityNote):
                self._say(act)
        return load.gate.verdict(NODE).mode is HarvestMode.ACTIVE
