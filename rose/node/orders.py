"""Orders that hold for a node's guests: the operator's modes, and the caps of capacity policies.

Orders of a scheduler, or of anything that answers in its place, are checked before they are obeyed
(`check_order`). A scheduler that falls silent changes no order: leases end by themselves, and a
node that has heard none for `staleAfter` harvests nothing: its guest is frozen and keeps no KV
memory but the least.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from executor.grant_controller import UNCAPPED, HarvestCaps
from rose.addresses import checked_source, checked_url
from rose.clock import boot_clock_s
from rose.errors import ConfigError, RefusedError
from rose.node.guest.kill_switch import KillSwitch
from rose.rpc import rose_pb2

# Life of a lease: a cut-off node stops computing at its end in any case.
STALE_AFTER_S: Final = 5.0
LEAST_S: Final = {"stale_after_s": 1.0, "reclaim_deadline_s": 0.5}
MOST_S: Final = 600.0
# A scheduler renews leases each second: one that lived for much longer would outlast the node's
# contact with it.
MAX_LEASE_TTL_S: Final = 60.0
MAX_EPOCH = MAX_VERSION = 2**53
MAX_NEIGHBOURS: Final = 4_096
MAX_NAME_CHARS: Final = 253


def check_order(command: rose_pb2.NodeCommand) -> None:
    """Raise RefusedError or ConfigError with a one-line reason if a scheduler's command has values
    out of bounds (lease, version, relays or caps); other commands pass.
    """
    match command.WhichOneof("command"):
        case "lease":
            _check_lease(command.lease)
        case "version":
            _check_version(command.version)
        case "relays":
            _check_relays(command.relays)
        case "caps":
            check_caps(command.caps)


def _check_lease(lease: rose_pb2.Lease) -> None:
    if lease.epoch > MAX_EPOCH:
        raise RefusedError(f"epoch {lease.epoch} of {lease.replica} is above 2^53")
    if max(len(lease.job), len(lease.model)) > MAX_NAME_CHARS:
        raise RefusedError(f"the job of {lease.replica} has a name of over {MAX_NAME_CHARS}")
    if not (math.isfinite(lease.ttl_s) and 0 < lease.ttl_s <= MAX_LEASE_TTL_S):
        raise RefusedError(
            f"a lease of {lease.replica} for {lease.ttl_s} s; it may live for up to"
            f" {MAX_LEASE_TTL_S:.0f} s"
        )


def _check_version(version: rose_pb2.Version) -> None:
    if not (version.parent <= version.version <= MAX_VERSION and version.version):
        raise RefusedError(
            f"version {version.version} with parent {version.parent}; versions grow, up to 2^53"
        )
    checked_source(version.url, f"the url of version {version.version}")


def _check_relays(relays: rose_pb2.Relays) -> None:
    if len(relays.urls) > MAX_NEIGHBOURS:
        raise RefusedError(f"{len(relays.urls)} relays at once; a cluster has {MAX_NEIGHBOURS}")
    for url in relays.urls:
        try:
            checked_url(url, "a neighbour's relay")
        except ConfigError as error:
            raise RefusedError(f"the cluster's relays stay as they were: {error}") from error


class SchedulerCaps:
    """Newest caps that a scheduler sent, and the time since its stream ended; an open stream counts
    as contact.

    The guard's thread reads it too: each attribute is one reference that is replaced.
    """

    def __init__(self, clock_s: Callable[[], float] = boot_clock_s) -> None:
        self._clock_s = clock_s
        self._lost_at_s: float | None = clock_s()
        self.harvest: HarvestCaps = UNCAPPED
        self.stale_after_s = STALE_AFTER_S
        self.reclaim_deadline_s: float | None = None

    def take(self, caps: rose_pb2.Caps) -> None:
        """Replace all earlier caps; a field that is left out returns to its default. Call
        `check_caps` first.
        """
        self.harvest = harvest_caps(caps)
        stale = caps.HasField("stale_after_s")
        self.stale_after_s = caps.stale_after_s if stale else STALE_AFTER_S
        bounded = caps.HasField("reclaim_deadline_s")
        self.reclaim_deadline_s = caps.reclaim_deadline_s if bounded else None

    @property
    def cut_off(self) -> bool:
        """True if no scheduler's stream has been open for longer than `stale_after_s` seconds."""
        return self.lost_s() > self.stale_after_s

    def heard(self) -> None:
        """Record that the scheduler's stream is open, so `lost_s` is 0."""
        self._lost_at_s = None

    def lost(self) -> None:
        """Record the time at which the scheduler's stream ended; a repeated call keeps the first
        time.
        """
        if self._lost_at_s is None:
            self._lost_at_s = self._clock_s()

    def lost_s(self) -> float:
        """Return the seconds since the scheduler's last stream ended, 0 while one is open."""
        lost_at_s = self._lost_at_s
        return 0.0 if lost_at_s is None else self._clock_s() - lost_at_s

    def lease_ttl_s(self, ttl_s: float) -> float:
        """Return the seconds for which this node honours a lease granted for `ttl_s`: the smaller
        of that and `stale_after_s`.
        """
        return min(ttl_s, self.stale_after_s)

    def reclaim_s(self, own_s: float) -> float:
        """Return the seconds that a memory reclaim may take: the smaller of `own_s`, the limit in
        the node's file, and the scheduler's deadline, if it sent one.
        """
        return own_s if self.reclaim_deadline_s is None else min(own_s, self.reclaim_deadline_s)


def harvest_caps(caps: rose_pb2.Caps) -> HarvestCaps:
    """Return the scheduler's Caps message as HarvestCaps, which the grant controller takes; a share
    that is left out is uncapped. Raises ValueError for invalid shares.
    """
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
    """Raise RefusedError with a one-line reason for a Caps message with invalid shares or times out
    of bounds; the caps in force stay as they are.
    """
    try:
        harvest_caps(caps)
    except ValueError as error:
        raise RefusedError(f"the caps stay as they were: {error}") from error
    for field, value in caps.ListFields():
        least_s = LEAST_S.get(field.name)
        if least_s is not None and not (math.isfinite(value) and least_s <= value <= MOST_S):
            raise RefusedError(f"the caps stay as they were: {field.name} is {value}")


class HarvestSwitch:
    """Harvest modes set by the scheduler: one for the cluster, and one for each replica that it
    named since.

    Before a scheduler sets a mode no guest is started; a guest that an earlier daemon left running
    stays, frozen. A scheduler that falls silent changes no mode: leases expire by themselves.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._off_since_s: dict[str, float] = {}
        self._cluster = rose_pb2.HARVEST_MODE_UNSPECIFIED
        self._own: dict[str, rose_pb2.HarvestMode.ValueType] = {}

    def take(self, command: rose_pb2.Harvest) -> None:
        """Set the mode of the named replica, or, if the command names none, that of the cluster,
        which erases all modes of single replicas.
        """
        if command.replica:
            self._own[command.replica] = command.mode
        else:
            self._cluster = command.mode
            self._own.clear()
        # Look at every replica now, so that a stop that is lifted for a moment begins anew.
        for replica in list(self._off_since_s):
            self.off(replica)

    @property
    def known(self) -> bool:
        """True if a scheduler has set the cluster's mode since this daemon started."""
        return self._cluster != rose_pb2.HARVEST_MODE_UNSPECIFIED

    def off(self, replica: str) -> bool:
        """Return True if the mode of the cluster or of this replica is OFF, so that its guest must
        not exist; the time of the change is kept for `off_since_s`.
        """
        barred = rose_pb2.HARVEST_MODE_OFF
        off = barred in (self._cluster, self._own.get(replica))
        if off:
            self._off_since_s.setdefault(replica, self._clock_s())
        else:
            self._off_since_s.pop(replica, None)
        return off

    def off_since_s(self, replica: str) -> float:
        """Return the clock's time in seconds at which the replica's mode became OFF, which tells
        one stop from the next; 0 while the guest may exist.
        """
        return self._off_since_s.get(replica, 0.0) if self.off(replica) else 0.0

    def off_s(self, replica: str) -> float:
        """Return the seconds for which the replica's mode has been OFF; 0 while the guest may
        exist.
        """
        since_s = self._off_since_s.get(replica)
        return self._clock_s() - since_s if self.off(replica) and since_s is not None else 0.0


@dataclass(frozen=True, slots=True)
class Orders:
    """Orders that hold for a node's guests: harvest modes, kill switch and capacity caps."""

    harvest: HarvestSwitch
    kill_switch: KillSwitch
    caps: SchedulerCaps

    def bars(self, guest: str) -> bool:
        """Return True if the kill switch is set or the guest's harvest mode is OFF, so that this
        guest must not exist.
        """
        return self.kill_switch.engaged or self.harvest.off(guest)
