"""The health of every offered replica, as its node's offers tell it."""

from collections.abc import Iterable

from elastic_scheduler import Health, HealthLimits, Offer, ReplicaHealth, Report
from rose.scheduler.messages import Action, Record
from rose.scheduler.versions import VersionChain


class HealthBook:
    """A machine for each replica; one whose node attaches anew begins anew."""

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self._limits = limits or HealthLimits()
        self._replicas: dict[str, ReplicaHealth] = {}

    def hear(self, offers: Iterable[Offer], chain: VersionChain, now_s: float) -> list[Action]:
        """A node's offers arrived; the changes, for the event log."""
        changes: list[Action] = []
        for offer in offers:
            health = self._replicas.get(offer.replica)
            if health is None:
                health = ReplicaHealth(chain.bound, now_s, self._limits)
                self._replicas[offer.replica] = health
            before = health.state
            health.set_bound(chain.bound)
            health.heard(
                Report(offer.healthy, offer.policy_version, chain.latest, offer.epoch), now_s
            )
            changes += self._changed(offer.replica, before, health.state)
        return changes

    def lapsed(self, replicas: Iterable[str]) -> list[Action]:
        """Their offers ran out before their node spoke again, and their leases with them."""
        changes: list[Action] = []
        for replica in replicas:
            health = self._replicas.get(replica)
            if health is not None:
                before = health.state
                health.silenced()
                changes += self._changed(replica, before, health.state)
        return changes

    def leased(self, replica: str, epoch: int, now_s: float) -> None:
        """A new lease was granted: one that had fallen silent is believed again under its epoch.

        How long is too long is what the node said of its offers: limits of seconds are not used.
        """
        health = self._replicas.get(replica)
        if health is None:
            return
        health.leased(epoch)
        if health.state is Health.DEAD:
            health.restarted(epoch, now_s)

    def forget(self, replicas: Iterable[str]) -> None:
        """Their node is lost: what it says when it is back is all there is to know."""
        for replica in replicas:
            self._replicas.pop(replica, None)

    def takes_turns(self, replica: str) -> bool:
        """Whether turns may be sent to the replica."""
        health = self._replicas.get(replica)
        return health is not None and health.takes_turns

    def _changed(self, replica: str, before: Health, after: Health) -> list[Action]:
        if before is after:
            return []
        fields: dict[str, object] = {
            "replica": replica,
            "before": before.value,
            "after": after.value,
        }
        return [Record("health_changed", fields)]
