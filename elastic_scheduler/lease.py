"""Who may use which replica, until when.

    (none) --grant--> ACTIVE --begin_release--> RELEASING --released--> (none)
                        |  renew: same epoch        |
                        +------- revoke, expire ----+-----------------> (none)

A replica has one lease at a time. Every grant has a greater epoch than all before it, across
restarts: persist `epochs()` before a new lease is sent anywhere and hand it back to the next book.
Messages that carry another epoch than the live lease's are refused, so a late release or revocation
can never end a younger lease.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic_scheduler.errors import LeaseHeld, StaleEpoch


class LeaseState(StrEnum):
    """Whether turns may still be sent to the replica."""

    ACTIVE = "active"
    RELEASING = "releasing"


@dataclass(frozen=True, slots=True)
class Lease:
    """A job's right to one replica; over at `expires_s` unless renewed."""

    job: str
    replica: str
    epoch: int
    expires_s: float
    state: LeaseState = LeaseState.ACTIVE

    @property
    def id(self) -> str:
        """Unique for all time, since epochs never repeat."""
        return f"{self.replica}@{self.epoch}"


class LeaseBook:
    """All live leases; times are seconds of one monotonic clock, handed in."""

    def __init__(self, ttl_s: float, epochs: Mapping[str, int] | None = None) -> None:
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s}; a lease needs a time to live above 0")
        self.ttl_s = ttl_s
        self._epochs = dict(epochs or {})
        self._leases: dict[str, Lease] = {}

    def epochs(self) -> dict[str, int]:
        """The newest epoch of every replica ever leased: what a store keeps across restarts."""
        return dict(self._epochs)

    def leases(self) -> tuple[Lease, ...]:
        """All leases that were not yet ended or collected by `expire`."""
        return tuple(self._leases.values())

    def live(self, replica: str, now_s: float) -> Lease | None:
        """The replica's lease unless it has run out."""
        lease = self._leases.get(replica)
        return lease if lease is not None and now_s < lease.expires_s else None

    def grant(self, job: str, replica: str, now_s: float, *, seen_epoch: int = 0) -> Lease:
        """Lease `replica` to `job` under a new epoch, greater than `seen_epoch` of its node too.

        Raises LeaseHeld while another lease of the replica lives.
        """
        held = self.live(replica, now_s)
        if held is not None:
            raise LeaseHeld(f"{replica} is leased to {held.job} as {held.id}; release it first")
        epoch = max(self._epochs.get(replica, 0), seen_epoch) + 1
        self._epochs[replica] = epoch
        lease = Lease(job, replica, epoch, now_s + self.ttl_s)
        self._leases[replica] = lease
        return lease

    def renew(self, replica: str, epoch: int, now_s: float) -> Lease:
        """Let the lease live for another TTL from now, under its epoch.

        Raises StaleEpoch for a lease that is over, releasing or of another epoch.
        """
        lease = self._expect(replica, epoch, now_s)
        if lease.state is not LeaseState.ACTIVE:
            raise StaleEpoch(f"{lease.id} is being released and cannot be renewed")
        renewed = replace(lease, expires_s=now_s + self.ttl_s)
        self._leases[replica] = renewed
        return renewed

    def begin_release(self, replica: str, epoch: int, now_s: float) -> Lease:
        """Ask for the replica back; it stays taken until `released`, `revoke` or expiry.

        Asking again changes nothing. Raises StaleEpoch as `renew` does.
        """
        lease = replace(self._expect(replica, epoch, now_s), state=LeaseState.RELEASING)
        self._leases[replica] = lease
        return lease

    def released(self, replica: str, epoch: int) -> Lease:
        """The node drained the replica. Raises StaleEpoch for any but the lease of `epoch`."""
        return self._end(replica, epoch)

    def revoke(self, replica: str, epoch: int) -> Lease:
        """The node took the replica back. Raises StaleEpoch for any but the lease of `epoch`."""
        return self._end(replica, epoch)

    def expire(self, now_s: float) -> tuple[Lease, ...]:
        """End and return every lease that has run out; expiry means revoked."""
        over = tuple(lease for lease in self._leases.values() if now_s >= lease.expires_s)
        for lease in over:
            del self._leases[lease.replica]
        return over

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
