"""Fleet: attached nodes with their latest reports, health of replicas, and relays of each cluster.

A node's word is void once its stream is over. `HealthBook` follows the health of every offered
replica. `Relays` tells each node, when that changes, which nodes of its cluster relay weights.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_scheduler import Health, HealthReport, Offer, ReplicaHealth
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.job_registry import JobRegistry
from rose.scheduler.core.messages import Action, Attached, Command, LogRecord
from rose.scheduler.persistence import JobRecord


def holds(offer: Offer, job: JobRecord) -> bool:
    """Whether a replica's weights are a version of the job: its own, or the model it began with."""
    if offer.job:
        return offer.job == job.job
    same_model = not (job.model and offer.model) or job.model == offer.model
    return offer.policy_version == 0 and same_model


class HealthBook:
    """Health state machines by replica; a replica whose node attaches anew begins anew.

    Each replica is judged for one job: that which has its lease, else that whose weights it holds.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, ReplicaHealth] = {}
        self._judged_for: dict[str, str] = {}
        # Counts up with whatever `takes_turns` hangs on.
        self.revision = 0

    def hear(
        self, offers: Iterable[Offer], jobs: JobRegistry, leased_to: Callable[[str], str]
    ) -> list[Action]:
        """A node's offers arrived; the changes, for the event log.

        leased_to: the job of a replica's lease, "" without one.
        """
        changes: list[Action] = []
        for offer in offers:
            only = jobs.only
            name = leased_to(offer.replica) or offer.job or (only.job if only else "")
            job, bound = jobs.get(name), jobs.bound(name)
            health = self._replicas.get(offer.replica)
            if health is None:
                health = ReplicaHealth(bound)
                self._replicas[offer.replica] = health
            before = health.state
            health.set_bound(bound)
            foreign = job is not None and not holds(offer, job)
            # Weights of a run that another one has replaced are nobody's to sample from.
            foreign |= offer.policy_version < jobs.first(name)
            latest = jobs.latest(name)
            held = offer.policy_version
            if not latest and held <= jobs.used(name):
                # Its chain was dropped: until there is another one all that it had is as good.
                held = 0
            health.heard(HealthReport(offer.healthy, held, latest, offer.epoch, foreign))
            if self._judged_for.get(offer.replica) != name:
                self._judged_for[offer.replica] = name
                self.revision += 1
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

    def leased(self, replica: str, epoch: int) -> None:
        """A new lease was granted: one that had fallen silent is believed again under its epoch."""
        health = self._replicas.get(replica)
        if health is None:
            return
        self.revision += 1
        health.leased(epoch)
        if health.state is Health.DEAD:
            health.restarted(epoch)

    def forget(self, replicas: Iterable[str]) -> None:
        """Their node is lost: what it says when it is back is all there is to know."""
        self.revision += 1
        for replica in replicas:
            self._replicas.pop(replica, None)
            self._judged_for.pop(replica, None)

    def takes_turns(self, replica: str, job: str = "") -> bool:
        """Whether turns of the job may be sent to the replica; without one, of whatever it is."""
        health = self._replicas.get(replica)
        if health is None or (job and self._judged_for.get(replica) != job):
            return False
        return health.takes_turns

    def _changed(self, replica: str, before: Health, after: Health) -> list[Action]:
        if before is after:
            return []
        self.revision += 1
        fields: dict[str, object] = {
            "replica": replica,
            "before": before.value,
            "after": after.value,
        }
        return [LogRecord("health_changed", fields)]


@dataclass(slots=True)
class NodeView:
    """One attached node; its word is void once its stream is over."""

    node: str
    stream: int
    cluster: str = ""
    relay_url: str = ""
    heard_s: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    takes_caps: bool = False
    takes_renewals: bool = False
    release: str = ""
    obeys: bool = False
    # The newest order of modes, when it was given, and how long until the node said that it holds.
    order: int = 0
    ordered_s: float = 0.0
    obeyed_s: float | None = None
    offers: dict[str, Offer] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)  # replicas that it ever offered
    offered_s: float = 0.0
    telemetry: pb.Telemetry = field(default_factory=pb.Telemetry)

    def ordered(self, order: int, now_s: float) -> None:
        """The node is told its modes anew."""
        self.order, self.ordered_s, self.obeyed_s = order, now_s, None

    def obeyed(self, order: int, now_s: float) -> None:
        """The node says that an order holds; of an older one nobody asks any more."""
        if order == self.order and self.obeyed_s is None:
            self.obeyed_s = max(0.0, now_s - self.ordered_s)

    def lapsed(self, now_s: float) -> list[str]:
        """Replicas whose offers ran out before the node spoke again."""
        return [name for name, each in self.offers.items() if each.is_stale(self.offered_s, now_s)]


# A node that was not attached for so long is no part of the fleet any more.
FORGOTTEN_S = 86_400.0
MAX_AWAY = 4_096


class Fleet:
    """All attached nodes, by their streams; and the names of those that were, lately."""

    def __init__(self) -> None:
        # Those that are not attached, the oldest first: when they were heard last; their labels.
        self._away: dict[str, tuple[float, Mapping[str, str]]] = {}
        self._nodes: dict[int, NodeView] = {}
        self._by_name: dict[str, NodeView] = {}
        # By replica: the streams that offer it, of which one at most is believed.
        self._offered_by: dict[str, list[int]] = {}
        # Counts up with every change of `live_offers`.
        self.revision = 0
        self._live: dict[str, Offer] | None = None
        self._live_until_s = 0.0

    @property
    def size(self) -> int:
        """Replicas that are offered, or were until lately."""
        return len(self._offered_by)

    @property
    def streams(self) -> list[int]:
        """Streams of all attached nodes."""
        return list(self._nodes)

    def takes_renewals(self, stream: int) -> bool:
        """Whether the node behind a stream takes renewals of its leases in one command."""
        view = self._nodes.get(stream)
        return view is not None and view.takes_renewals

    @property
    def nodes(self) -> list[NodeView]:
        """All attached nodes."""
        return list(self._nodes.values())

    def attach(self, event: Attached, now_s: float) -> None:
        """A node that has no stream yet is there now."""
        self._away.pop(event.node, None)
        self._nodes[event.stream] = self._by_name[event.node] = NodeView(
            event.node,
            event.stream,
            event.cluster,
            event.relay_url,
            now_s,
            labels=dict(event.labels),
            takes_caps=event.takes_caps,
            takes_renewals=event.takes_renewals,
            release=event.release,
            obeys=event.obeys,
        )

    def detach(self, stream: int) -> NodeView | None:
        """Forget a node; None when it is forgotten already."""
        view = self._nodes.pop(stream, None)
        if view is not None:
            if self._by_name.get(view.node) is view:
                del self._by_name[view.node]
                self._left(view.node, view.heard_s, view.labels)
            self._index(view, {})
        return view

    def recall(self, nodes: Iterable[str], now_s: float) -> None:
        """Know of nodes that an earlier leader leased from, and that are not attached here."""
        for node in nodes:
            if node not in self._by_name and node not in self._away:
                self._left(node, now_s, {})

    def away(self, now_s: float) -> list[tuple[str, float]]:
        """Known nodes that are not attached, and for how long nothing was heard of them."""
        for node, (heard_s, _) in list(self._away.items()):
            if now_s < heard_s + FORGOTTEN_S:
                break
            del self._away[node]
        return sorted((node, now_s - heard_s) for node, (heard_s, _) in self._away.items())

    def labels_away(self, node: str) -> Mapping[str, str]:
        """Labels that a node had which is away; none of one that only an earlier leader saw."""
        return self._away[node][1] if node in self._away else {}

    def _left(self, node: str, heard_s: float, labels: Mapping[str, str]) -> None:
        self._away.pop(node, None)
        self._away[node] = heard_s, labels
        if len(self._away) > MAX_AWAY:
            del self._away[next(iter(self._away))]

    def of_stream(self, stream: int) -> NodeView | None:
        """The node behind a stream, None for one that was replaced or lost."""
        return self._nodes.get(stream)

    def of_node(self, node: str) -> NodeView | None:
        """The attached node of that name."""
        return self._by_name.get(node)

    def of_replica(self, replica: str) -> NodeView | None:
        """The node that offers the replica."""
        streams = self._offered_by.get(replica)
        return self._nodes[min(streams)] if streams else None

    def replace_offers(self, view: NodeView, offers: tuple[Offer, ...], now_s: float) -> list[str]:
        """All that a node offers now; returns the replicas that another node offers already."""
        taken = {o.replica for o in offers if self._is_taken(o.replica, view, now_s)}
        news = {offer.replica: offer for offer in offers if offer.replica not in taken}
        if news != view.offers or view.lapsed(now_s):
            self._index(view, news)
            view.named.update(view.offers)
        view.offered_s = now_s
        return [offer.replica for offer in offers if offer.replica in taken]

    def _is_taken(self, replica: str, view: NodeView, now_s: float) -> bool:
        """Whether another node offers the replica now."""
        return any(
            stream != view.stream
            and not (other := self._nodes[stream]).offers[replica].is_stale(other.offered_s, now_s)
            for stream in self._offered_by.get(replica, ())
        )

    def _index(self, view: NodeView, offers: dict[str, Offer]) -> None:
        for replica in view.offers.keys() - offers.keys():
            streams = self._offered_by[replica]
            streams.remove(view.stream)
            if not streams:
                del self._offered_by[replica]
        for replica in offers.keys() - view.offers.keys():
            self._offered_by.setdefault(replica, []).append(view.stream)
        view.offers = offers
        self._forget_live()

    def _forget_live(self) -> None:
        self.revision += 1
        self._live = None

    def set_version(self, view: NodeView, replica: str, job: str, version: int) -> None:
        """A replica runs another version than its offer says."""
        if replica in view.offers:
            view.offers[replica] = replace(view.offers[replica], job=job, policy_version=version)
            self._forget_live()

    def live_offers(self, now_s: float) -> Mapping[str, Offer]:
        """Offers that have not run out, in the order of their replicas' ids."""
        if self._live is None or now_s >= self._live_until_s:
            live: list[Offer] = []
            # Whoever reports meanwhile lives longer: until then nothing runs out.
            until_s = math.inf
            for view in self._nodes.values():
                for offer in view.offers.values():
                    if not offer.is_stale(view.offered_s, now_s):
                        live.append(offer)
                        until_s = min(until_s, view.offered_s + offer.ttl_s)
            live.sort(key=lambda offer: offer.replica)
            before = self._live
            self._live = {offer.replica: offer for offer in live}
            self._live_until_s = until_s
            if before is not None and len(before) != len(live):
                self.revision += 1
        return self._live


# A node reports twice a second.
LAPSED_S = 3.0


class Relays:
    """Relays of each cluster, as each stream was told last."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[str, ...]] = {}
        self._until_s = -math.inf

    def changed(self) -> None:
        """A node came, went, or is heard again after a silence."""
        self._until_s = -math.inf

    def told(self, nodes: Callable[[], Sequence[NodeView]], now_s: float) -> list[Command]:
        """What is to be said now; nothing where nothing changed. A new stream knows of nobody."""
        if now_s < self._until_s:
            return []
        return self._tell(nodes(), now_s)

    def _tell(self, nodes: Sequence[NodeView], now_s: float) -> list[Command]:
        # Until the first of them may have fallen silent, or somebody says `changed`.
        heard_s = [view.heard_s for view in nodes if now_s < view.heard_s + LAPSED_S]
        self._until_s = min(heard_s, default=math.inf) + LAPSED_S
        live: dict[str, list[str]] = {}
        for view in nodes:
            if view.relay_url and now_s < view.heard_s + LAPSED_S:
                live.setdefault(view.cluster, []).append(view.relay_url)
        urls_of = {cluster: tuple(sorted(set(urls))) for cluster, urls in live.items()}
        wanted = {view.stream: urls_of.get(view.cluster, ()) for view in nodes}
        changed = {s: urls for s, urls in wanted.items() if urls != self._told.get(s, ())}
        self._told = wanted
        return [
            Command(stream, pb.NodeCommand(relays=pb.Relays(urls=urls)))
            for stream, urls in changed.items()
        ]
