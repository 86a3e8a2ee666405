"""Caps of capacity policies as last received, and a scheduler silent for longer than `staleAfter`.

A scheduler that falls silent changes no cap: leases end by themselves, and a node that has heard
none for `staleAfter` harvests nothing: its guest is frozen and keeps no KV memory but the least.
"""

import math
from collections.abc import Callable
from typing import Final

from executor.grant_controller import UNCAPPED, HarvestCaps
from rose.clock import boot_clock_s
from rose.errors import RefusedError
from rose.rpc import rose_pb2

# A lease's life: a cut-off node stops computing at its end in any case.
STALE_AFTER_S: Final = 5.0
LEAST_S: Final = {"stale_after_s": 1.0, "reclaim_deadline_s": 0.5}
MOST_S: Final = 600.0


class SchedulerCaps:
    """Newest caps. Read from the guard's thread too: each is one reference that is replaced."""

    def __init__(self, lost_s: Callable[[], float] = lambda: 0.0) -> None:
        """`lost_s`: for how long no scheduler was heard, 0 while one is."""
        self._lost_s = lost_s
        self.harvest: HarvestCaps = UNCAPPED
        self.stale_after_s = STALE_AFTER_S
        self.reclaim_deadline_s: float | None = None

    def take(self, caps: rose_pb2.Caps) -> None:
        """Replace what was said before. `check_caps` comes first."""
        self.harvest = harvest_caps(caps)
        stale = caps.HasField("stale_after_s")
        self.stale_after_s = caps.stale_after_s if stale else STALE_AFTER_S
        bounded = caps.HasField("reclaim_deadline_s")
        self.reclaim_deadline_s = caps.reclaim_deadline_s if bounded else None

    @property
    def cut_off(self) -> bool:
        """True if no scheduler has been heard for longer than `staleAfter`."""
        return self._lost_s() > self.stale_after_s

    def lease_ttl_s(self, ttl_s: float) -> float:
        """Return the time for which a grant or renewal counts on this node."""
        return min(ttl_s, self.stale_after_s)

    def reclaim_s(self, own_s: float) -> float:
        """Return the time that a reclaim may take; `own_s` is the limit in the node's file."""
        return own_s if self.reclaim_deadline_s is None else min(own_s, self.reclaim_deadline_s)


def harvest_caps(caps: rose_pb2.Caps) -> HarvestCaps:
    """Return the scheduler's caps as the guard's. Raises ValueError for invalid shares."""
    said = {field.name: value for field, value in caps.ListFields()}
    return HarvestCaps(
        compute=said.get("compute"),
        kv_bytes=said.get("kv_bytes"),
        kv_headroom=said.get("kv_headroom", 0.0),
        slack_share=said.get("slack_share"),
        high_watermark=said.get("high_watermark"),
        low_watermark=said.get("low_watermark"),
    )


def check_caps(caps: rose_pb2.Caps) -> None:
    """Raise RefusedError, in a line, for caps that are not to be obeyed; those before stay."""
    try:
        harvest_caps(caps)
    except ValueError as error:
        raise RefusedError(f"the caps stay as they were: {error}") from error
    for field, value in caps.ListFields():
        least_s = LEAST_S.get(field.name)
        if least_s is not None and not (math.isfinite(value) and least_s <= value <= MOST_S):
            raise RefusedError(f"the caps stay as they were: {field.name} is {value}")


class SchedulerContact:
    """Time of the scheduler's last sign of life; an open stream counts as one."""

    def __init__(self, clock_s: Callable[[], float] = boot_clock_s) -> None:
        self._clock_s = clock_s
        self._lost_at_s: float | None = clock_s()

    def heard(self) -> None:
        """Record that the stream is open."""
        self._lost_at_s = None

    def lost(self) -> None:
        """Record that the stream has ended."""
        if self._lost_at_s is None:
            self._lost_at_s = self._clock_s()

    def lost_s(self) -> float:
        """Return the seconds without a stream, 0 while one is open."""
        lost_at_s = self._lost_at_s
        return 0.0 if lost_at_s is None else self._clock_s() - lost_at_s
