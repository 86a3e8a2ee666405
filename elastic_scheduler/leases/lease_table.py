"""Offers of nodes, the table of leases, and the modes of lending.

An offer is one replica's capacity, and it goes stale soon unless the node repeats it.

    (none) --grant--> ACTIVE --begin_release--> RELEASING --released--> (none)
                        |  renew: same epoch        |
                        +------- revoke, expire ----+-----------------> (none)

A replica has one lease at a time. Every grant has a greater epoch than all before it, across
restarts: an epoch is `proposed`, persisted, `reserve`d, and only then granted under. After a
restart the next table is given the persisted epochs, and may `adopt` a lease of the newest epoch,
which lives on at its node.

Messages that carry another epoch than the live lease's are refused, so a late release or revocation
can never end a younger lease.

A harvest mode says which guests may be lent. The operator's stop is one of the cluster and stricter
ones of single replicas; a capacity policy's verdict on a node is one too
(`elastic_scheduler.capacity.gate`), and the stricter holds.

| mode | new leases of guests | live leases of guests |
| --- | --- | --- |
| ACTIVE | granted | renewed |
| HOLD | none | renewed |
| HOLD_AND_DRAIN | none | released |
| OFF | none | released; the node ends its guests |

Dedicated replicas belong to the jobs, not to the operator of a serving cluster: they are leased in
every mode.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic_scheduler.errors import LeaseError, LeaseHeld, StaleEpoch

# An offer comes from another process. These bounds are beyond any real figure, and far enough below
# the limits of doubles, sums and messages: no figure within them can break a computation.
MAX_EPOCH = 2**53
MAX_VERSION = 2**53
MAX_KV_TOKENS = 2**40
MAX_SEQUENCES = 2**20
MAX_TOK_S = 1e9
MAX_TTL_S = 3_600.0
MAX_NAME_CHARS = 253
MAX_URL_CHARS = 2_048
# Most epochs that a node may be ahead of the table, as after the store was lost: a node can neither
# use all epochs up in a step nor reach one that no message holds.
MAX_EPOCH_LEAD = 2**20
# Epochs are kept for ever, so the number of names must be bounded.
MAX_REPLICAS = 2**18


class ReplicaKind(StrEnum):
    """Kind of a replica: the job's own (dedicated), or a guest beside a serving host."""

    GUEST = "guest"
    DEDICATED = "dedicated"


class SwitchKind(StrEnum):
    """Work that a replica needs before it serves its next job, the cheapest first.

    NONE    it has the job's weights, or the model that the job began with
    JOB     the running engine is updated to the job's weights
    MODEL   its engine is started anew with the job's model
    """

    NONE = "none"
    JOB = "job"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Offer:
    """Replica that a node offers to lease; the offer expires `ttl_s` after it arrived.

    epoch: newest lease epoch that the node has seen for the replica; the next lease's is greater.
    Rates are tokens per second at full batch, 0 if unknown. policy_version: version of the weights
    of `job`; job is "" for version 0 of the model that the replica was started with. model: the
    model that it runs, "" if unknown. models: models that it can be switched to; near: those of
    them that need no restart of its engine.
    """

    replica: str
    kind: ReplicaKind
    url: str
    node: str
    kv_tokens: int
    decode_tok_s: float
    prefill_tok_s: float
    policy_version: int
    healthy: bool
    ttl_s: float
    epoch: int
    max_sequences: int
    job: str = ""
    model: str = ""
    models: tuple[str, ...] = ()
    near: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for values that are out of bounds."""
        for name, text in (("id", self.replica), ("node", self.node)):
            if not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable():
                raise ValueError(
                    f"a replica's {name} is {text[:40]!r}; give 1 to {MAX_NAME_CHARS} printable"
                    " characters"
                )
        if not 0 < len(self.url) <= MAX_URL_CHARS:
            raise ValueError(f"the offer of {self.replica} has no url, or one without end")
        if not 0 < self.ttl_s <= MAX_TTL_S:
            raise ValueError(
                f"ttl_s of {self.replica} is {self.ttl_s}; offer for a time above 0, up to"
                f" {MAX_TTL_S:.0f}"
            )
        for figure, value, most in (
            ("kv_tokens", self.kv_tokens, MAX_KV_TOKENS),
            ("decode_tok_s", self.decode_tok_s, MAX_TOK_S),
            ("prefill_tok_s", self.prefill_tok_s, MAX_TOK_S),
            ("policy_version", self.policy_version, MAX_VERSION),
            ("epoch", self.epoch, MAX_EPOCH),
            ("max_sequences", self.max_sequences, MAX_SEQUENCES),
        ):
            if not (math.isfinite(value) and 0 <= value <= most):
                raise ValueError(
                    f"{figure} of {self.replica} is {value}; offer a figure of 0 to {most:.0f}"
                )

    def serves(self, model: str) -> bool:
        """Return True if the replica runs the model or can be switched to it; "" fits any model."""
        return not model or not self.model or model == self.model or model in self.models

    def switch_to(self, job: str, model: str) -> "SwitchKind":
        """Return the kind of switch that the replica needs before it can serve the job."""
        other_model = model and self.model and model != self.model
        if other_model and model not in self.near:
            return SwitchKind.MODEL
        if self.job == job or not (self.job or other_model):
            return SwitchKind.NONE
        return SwitchKind.JOB

    def is_stale(self, received_s: float, now_s: float) -> bool:
        """Return True if the offer that arrived at `received_s` has expired at `now_s`."""
        return now_s >= received_s + self.ttl_s


class LeaseState(StrEnum):
    """State of a lease: ACTIVE, turns may be sent; RELEASING, no new turns may be sent."""

    ACTIVE = "active"
    RELEASING = "releasing"


@dataclass(frozen=True, slots=True)
class Lease:
    """A job's right to one replica, which ends at `expires_s` unless renewed."""

    job: str
    replica: str
    epoch: int
    expires_s: float
    state: LeaseState = LeaseState.ACTIVE

    @property
    def id(self) -> str:
        """Replica and epoch, unique for all time since epochs never repeat."""
        return f"{self.replica}@{self.epoch}"


class LeaseTable:
    """Table of all live leases and of the newest lease epoch of each replica.

    Times are seconds of one monotonic clock, passed in.
    """

    def __init__(
        self, ttl_s: float, epochs: Mapping[str, int] | None = None, floor: int = 0
    ) -> None:
        """Begin with the stored epochs by replica.

        floor: epochs up to it count as used for every replica.
        """
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s}; a lease needs a time to live above 0")
        self.ttl_s = ttl_s
        self._epochs = dict(epochs or {})  # the newest used of each replica
        self._floor = floor
        self._reserved: dict[str, int] = {}  # persisted and not used yet
        self._leases: dict[str, Lease] = {}
        # No lease runs out before this: renewals only make them longer.
        self._none_over_until_s = math.inf

    def epochs(self) -> dict[str, int]:
        """Return the newest lease epoch by replica, used or only reserved, to be stored."""
        return self._epochs | self._reserved

    def leases(self) -> tuple[Lease, ...]:
        """Return all leases that were not ended; expired ones remain until `expire` is called."""
        return tuple(self._leases.values())

    def held(self, replica: str) -> Lease | None:
        """Return the replica's lease until it is ended, even if it has expired; else None."""
        return self._leases.get(replica)

    def live(self, replica: str, now_s: float) -> Lease | None:
        """Return the replica's lease, None if it has none or the lease has expired."""
        lease = self._leases.get(replica)
        return lease if lease is not None and now_s < lease.expires_s else None

    def believes(self, replica: str, seen_epoch: int) -> bool:
        """Return True if an epoch that a node reports is plausible: at most 2^20 ahead."""
        return 0 <= seen_epoch <= min(MAX_EPOCH - 1, self._newest(replica) + MAX_EPOCH_LEAD)

    def proposed(self, replica: str, seen_epoch: int = 0) -> int:
        """Return the epoch for the replica's next lease, to be stored and then reserved.

        It is greater than all used ones and than `seen_epoch`, which the replica's node reports.
        Raises StaleEpoch for an implausible `seen_epoch`, LeaseError for too many replicas.
        """
        if replica not in self._epochs and len(self._epochs) >= MAX_REPLICAS:
            raise LeaseError(
                f"{MAX_REPLICAS} replicas had leases before {replica}; start a new store"
            )
        if not self.believes(replica, seen_epoch):
            raise StaleEpoch(
                f"epoch {seen_epoch} of {replica} is too far ahead of {self._newest(replica)};"
                " start its node anew"
            )
        return max(self._newest(replica), seen_epoch) + 1

    def reserve(self, replica: str, epoch: int) -> None:
        """Record that the epoch is stored, so that the next lease may be granted under it."""
        if epoch > self._newest(replica):
            self._reserved[replica] = epoch

    def reserved(self, replica: str, seen_epoch: int = 0) -> bool:
        """Return True if an epoch greater than `seen_epoch` is stored and not used yet."""
        return self._reserved.get(replica, 0) > seen_epoch

    def grant(self, job: str, replica: str, now_s: float, *, seen_epoch: int = 0) -> Lease:
        """Grant and return a lease of the replica to the job, under the reserved epoch.

        Raises LeaseHeld while another lease of the replica lives, StaleEpoch if no epoch greater
        than `seen_epoch` is reserved.
        """
        held = self.live(replica, now_s)
        if held is not None:
            raise LeaseHeld(f"{replica} is leased to {held.job} as {held.id}; release it first")
        if not self.reserved(replica, seen_epoch):
            raise StaleEpoch(f"{replica} has no persisted epoch above {seen_epoch}; reserve one")
        epoch = self._epochs[replica] = self._reserved.pop(replica)
        return self._begin(Lease(job, replica, epoch, now_s + self.ttl_s))

    def adopt(self, job: str, replica: str, epoch: int, left_s: float, now_s: float) -> Lease:
        """Return a lease that was granted before a restart, entered under its own newest epoch.

        It expires after `left_s`, at most `ttl_s`. Raises LeaseHeld while another lease of the
        replica lives, StaleEpoch for another epoch than the newest.
        """
        held = self.live(replica, now_s)
        if held is not None:
            raise LeaseHeld(f"{replica} is leased to {held.job} as {held.id}; release it first")
        if epoch != self._newest(replica):
            raise StaleEpoch(_refusal(replica, epoch, None))
        return self._begin(Lease(job, replica, epoch, now_s + min(left_s, self.ttl_s)))

    def renew(self, replica: str, epoch: int, now_s: float) -> Lease:
        """Return the lease, extended to `ttl_s` from now under the same epoch.

        Raises StaleEpoch for a lease that has ended, is releasing or has another epoch.
        """
        lease = self._expect(replica, epoch, now_s)
        if lease.state is not LeaseState.ACTIVE:
            raise StaleEpoch(f"{lease.id} is being released and cannot be renewed")
        renewed = replace(lease, expires_s=now_s + self.ttl_s)
        self._leases[replica] = renewed
        return renewed

    def begin_release(self, replica: str, epoch: int, now_s: float) -> Lease:
        """Set the lease to RELEASING and return it; it holds the replica until it ends.

        Repeating this changes nothing. Raises StaleEpoch if the live lease is of another epoch.
        """
        lease = replace(self._expect(replica, epoch, now_s), state=LeaseState.RELEASING)
        self._leases[replica] = lease
        return lease

    def released(self, replica: str, epoch: int) -> Lease:
        """End and return a lease whose replica was drained. Raises StaleEpoch for another epoch."""
        return self._end(replica, epoch)

    def revoke(self, replica: str, epoch: int) -> Lease:
        """End and return a lease that was taken back. Raises StaleEpoch for another epoch."""
        return self._end(replica, epoch)

    def expire(self, now_s: float) -> tuple[Lease, ...]:
        """End and return all leases that have expired."""
        if now_s < self._none_over_until_s:
            return ()
        over = tuple(lease for lease in self._leases.values() if now_s >= lease.expires_s)
        for lease in over:
            del self._leases[lease.replica]
        left = (lease.expires_s for lease in self._leases.values())
        self._none_over_until_s = min(left, default=math.inf)
        return over

    def _begin(self, lease: Lease) -> Lease:
        self._leases[lease.replica] = lease
        self._none_over_until_s = min(self._none_over_until_s, lease.expires_s)
        return lease

    def _newest(self, replica: str) -> int:
        return max(self._epochs.get(replica, 0), self._reserved.get(replica, 0), self._floor)

    def _expect(self, replica: str, epoch: int, now_s: float) -> Lease:
        lease = self.live(replica, now_s)
        if lease is None or lease.epoch != epoch:
            raise StaleEpoch(_refusal(replica, epoch, lease))
        return lease

    def _end(self, replica: str, epoch: int) -> Lease:
        lease = self._leases.get(replica)
        if lease is None or lease.epoch != epoch:
            raise StaleEpoch(_refusal(replica, epoch, lease))
        return self._leases.pop(replica)


def _refusal(replica: str, epoch: int, lease: Lease | None) -> str:
    now = f"its lease is {lease.id}" if lease else "it has no lease"
    return f"epoch {epoch} of {replica} is refused: {now}; read the table again"


class HarvestMode(StrEnum):
    """Mode of lending guests, the strictest first. OFF: guests are ended.

    HOLD_AND_DRAIN: their leases are released. HOLD: no new leases. ACTIVE: guests are lent.
    """

    OFF = "off"
    HOLD_AND_DRAIN = "hold_and_drain"
    HOLD = "hold"
    ACTIVE = "active"


_STRICTEST_FIRST = tuple(HarvestMode)


def stricter(one: HarvestMode, other: HarvestMode) -> HarvestMode:
    """Return the one of two modes that lends less."""
    # Called for every replica at every turn, and mostly nothing is against lending.
    if one is other or other is HarvestMode.ACTIVE:
        return one
    if one is HarvestMode.ACTIVE:
        return other
    return min(one, other, key=_STRICTEST_FIRST.index)


@dataclass(frozen=True, slots=True)
class HarvestPlan:
    """Changes of leases that modes and policies allow now: offers that may be leased, and leases to
    renew, to release, and to release since they are more guests than a policy allows.

    A lease in none of these is being released already, or has no live offer and expires.
    """

    lease: tuple[Offer, ...]
    renew: tuple[Lease, ...]
    release: tuple[Lease, ...]
    beyond: tuple[Lease, ...]


class HarvestModes:
    """The operator's stop: a mode of the cluster, and modes of single replicas.

    The stricter of both holds, so that a forgotten permission for one replica never defeats a
    cluster-wide stop.
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
        """Copy of the modes that were set for single replicas."""
        return dict(self._overrides)

    def set_mode(self, mode: HarvestMode, replica: str | None = None) -> None:
        """Set the cluster's mode, or one replica's; ACTIVE removes a replica's own mode."""
        if replica is None:
            self.mode = mode
        elif mode is HarvestMode.ACTIVE:
            self._overrides.pop(replica, None)
        else:
            self._overrides[replica] = mode

    def mode_of(self, replica: str) -> HarvestMode:
        """Return the mode that holds for a guest: the stricter of the cluster's and its own."""
        own = self._overrides.get(replica)
        return self.mode if own is None else stricter(self.mode, own)
