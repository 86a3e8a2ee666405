"""Fleet: attached nodes with their latest reports, health of replicas, and relays of each cluster.

A node's reports are void once its stream has ended. `HealthBook` has the health of every offered
replica. `Relays` tells each node, when that changes, which nodes of its cluster relay weights.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from elastic_scheduler import Health, HealthReport, Offer, ReplicaHealth
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.job_registry import JobRegistry
from rose.scheduler.core.messages import Action, Attached, Command, LogRecord
from rose.scheduler.persistence import JobRecord

# A node that was not attached for so long is no part of the fleet any more.
FORGOTTEN_S = 86_400.0
MAX_AWAY = 4_096
# A node reports twice a second.
LAPSED_S = 3.0


def holds(offer: Offer, job: JobRecord) -> bool:
    """Return True if a replica's weights are a version of the job or the model it began with."""
    if offer.job:
        return offer.job == job.job
    same_model = not (job.model and offer.model) or job.model == offer.model
    return offer.policy_version == 0 and same_model


class HealthBook:
    """Health state machine of each offered replica; one whose node attaches anew begins anew.

    A replica is judged for one job: the job that leases it, else the job whose weights it has.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, ReplicaHealth] = {}
        self._judged_for: dict[str, str] = {}
        # Counts up with whatever `takes_turns` hangs on.
        self.revision = 0

    def hear(
        self, offers: Iterable[Offer], jobs: JobRegistry, leased_to: Callable[[str], str]
    ) -> list[Action]:
        """Update the health of offered replicas; return log records of the states that changed.

        leased_to: returns the job that leases a replica, "" without one.
        """
        changes: list[Action] = []
        for offer in offers:
            only = jobs.only
            name = leased_to(offer.replica) or offer.job or (only.job if only else "")
            job, bound, chain = jobs.get(name), jobs.bound(name), jobs.chain(name)
            health = self._replicas.get(offer.replica)
            if health is None:
                health = ReplicaHealth(bound)
                self._replicas[offer.replica] = health
            before = health.state
            health.set_bound(bound)
            foreign = job is not None and not holds(offer, job)
            # No turn may sample from weights of a run that another one has replaced.
            foreign |= offer.policy_version < chain.first
            held = offer.policy_version
            if not chain.latest and held <= chain.used:
                # Its chain was dropped: until there is another one all that it had is as good.
                held = 0
            health.heard(HealthReport(offer.healthy, held, chain.latest, offer.epoch, foreign))
            if self._judged_for.get(offer.replica) != name:
                self._judged_for[offer.replica] = name
                self.revision += 1
            changes += self._changed(offer.replica, before, health.state)
        return changes

    def lapsed(self, replicas: Iterable[str]) -> list[Action]:
        """Mark replicas as silent whose offers expired; return log records of changed states."""
        changes: list[Action] = []
        for replica in replicas:
            health = self._replicas.get(replica)
            if health is not None:
                before = health.state
                health.silenced()
                changes += self._changed(replica, before, health.state)
        return changes

    def leased(self, replica: str, epoch: int) -> None:
        """Record a new lease; a dead replica counts as restarted under the lease's epoch."""
        health = self._replicas.get(replica)
        if health is None:
            return
        self.revision += 1
        health.leased(epoch)
        if health.state is Health.DEAD:
            health.restarted(epoch)

    def forget(self, replicas: Iterable[str]) -> None:
        """Delete the health of a lost node's replicas."""
        self.revision += 1
        for replica in replicas:
            self._replicas.pop(replica, None)
            self._judged_for.pop(replica, None)

    def takes_turns(self, replica: str, job: str = "") -> bool:
        """Return True if the replica is healthy and judged for the job; "": for any job."""
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
    """Attached node: its hello, newest offers and telemetry; void once its stream has ended."""

    hello: Attached
    heard_s: float
    # Why its labels are not known, if they are not.
    unlabelled: str = ""
    # The newest order of modes, when it was given, and how long until the node said that it holds.
    order: int = 0
    ordered_s: float = 0.0
    obeyed_s: float | None = None
    offers: dict[str, Offer] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)  # replicas that it ever offered
    offered_s: float = 0.0
    telemetry: pb.Telemetry = field(default_factory=pb.Telemetry)

    @property
    def node(self) -> str:
        return self.hello.node

    @property
    def stream(self) -> int:
        return self.hello.stream

    def ordered(self, order: int, now_s: float) -> None:
        """Record that a new order of modes was sent to the node and is not confirmed yet."""
        self.order, self.ordered_s, self.obeyed_s = order, now_s, None

    def obeyed(self, order: int, now_s: float) -> list[Action]:
        """Record the seconds until the node confirmed the newest order; ignore older orders.

        Return no actions.
        """
        if order == self.order and self.obeyed_s is None:
            self.obeyed_s = max(0.0, now_s - self.ordered_s)
        return []

    def lapsed(self, now_s: float) -> list[str]:
        """Return the replicas whose offers expired since the node last reported offers."""
        return [name for name, each in self.offers.items() if each.is_stale(self.offered_s, now_s)]


def is_chosen(key: str, patterns: Iterable[str]) -> bool:
    """Return True if a label's key matches one of the patterns, as `pool` or `example.com/*`."""
    return any(fnmatchcase(key, each) for each in patterns)


class FleetBook:
    """Attached nodes by stream, and nodes that were attached within the last day."""

    def __init__(self, label_keys: Sequence[str] = ()) -> None:
        """Begin without nodes. label_keys: patterns of the labels that Kubernetes alone decides."""
        self._label_keys = label_keys
        self._labels: Mapping[str, Mapping[str, str]] | None = None
        # Detached nodes, oldest first: time of the last message, labels.
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
        """Number of replicas offered by attached nodes, expired offers included."""
        return len(self._offered_by)

    @property
    def streams(self) -> list[int]:
        """Stream numbers of all attached nodes."""
        return list(self._nodes)

    def takes_renewals(self, stream: int) -> bool:
        """Return True if the node on a stream accepts renewals of several leases in one command."""
        view = self._nodes.get(stream)
        return view is not None and view.hello.takes_renewals

    @property
    def nodes(self) -> list[NodeView]:
        """Views of all attached nodes, in the order in which they attached."""
        return list(self._nodes.values())

    def attach(self, event: Attached, now_s: float) -> None:
        """Add the attached node of a hello; the node must have no other stream."""
        self._away.pop(event.node, None)
        view = self._nodes[event.stream] = self._by_name[event.node] = NodeView(event, now_s)
        self._label(view)

    def relabel(self, labels: Mapping[str, Mapping[str, str]]) -> None:
        """Give nodes the labels of the Kubernetes nodes of their names; they are no news."""
        if labels is not self._labels:
            self._labels = labels
            for view in self._nodes.values():
                self._label(view)

    def _label(self, view: NodeView) -> None:
        """Set the labels that Kubernetes decides; a node that claims them is not believed."""
        if not self._label_keys:
            return
        given = None if self._labels is None else self._labels.get(view.node)
        unheard = (
            "the API server is not heard yet" if self._labels is None else "it has no such node"
        )
        view.unlabelled = (
            "" if given is not None else f"labels of Kubernetes are unknown: {unheard}"
        )
        own = {k: v for k, v in view.hello.labels.items() if not is_chosen(k, self._label_keys)}
        view.hello = replace(view.hello, labels={**own, **(given or {})})

    def detach(self, stream: int) -> NodeView | None:
        """Remove and return the node on a stream, None if there is none; the node is then away."""
        view = self._nodes.pop(stream, None)
        if view is not None:
            if self._by_name.get(view.node) is view:
                del self._by_name[view.node]
                self._left(view.node, view.heard_s, view.hello.labels)
            self._index(view, {})
        return view

    def recall(self, nodes: Iterable[str], now_s: float) -> None:
        """List nodes as away from which an earlier leader leased, unless they are known here."""
        for node in nodes:
            if node not in self._by_name and node not in self._away:
                self._left(node, now_s, {})

    def away(self, now_s: float) -> list[tuple[str, float]]:
        """Return (node, seconds since its last message) for each known node that is not attached.

        Nodes that were away for a day are dropped.
        """
        for node, (heard_s, _) in list(self._away.items()):
            if now_s < heard_s + FORGOTTEN_S:
                break
            del self._away[node]
        return sorted((node, now_s - heard_s) for node, (heard_s, _) in self._away.items())

    def labels_away(self, node: str) -> Mapping[str, str]:
        """Return the last labels of a node that is away, none if only an earlier leader saw it."""
        return self._away[node][1] if node in self._away else {}

    def _left(self, node: str, heard_s: float, labels: Mapping[str, str]) -> None:
        self._away.pop(node, None)
        self._away[node] = heard_s, labels
        if len(self._away) > MAX_AWAY:
            del self._away[next(iter(self._away))]

    def of_stream(self, stream: int) -> NodeView | None:
        """Return the node attached on a stream, None if the stream was replaced or lost."""
        return self._nodes.get(stream)

    def of_node(self, node: str) -> NodeView | None:
        """Return the attached node with that name, None if there is none."""
        return self._by_name.get(node)

    def replace_offers(self, view: NodeView, offers: tuple[Offer, ...], now_s: float) -> list[str]:
        """Replace a node's offers; return the replicas left out since another node offers them."""
        taken = {o.replica for o in offers if self._is_taken(o.replica, view, now_s)}
        news = {offer.replica: offer for offer in offers if offer.replica not in taken}
        if news != view.offers or view.lapsed(now_s):
            self._index(view, news)
            view.named.update(view.offers)
        view.offered_s = now_s
        return [offer.replica for offer in offers if offer.replica in taken]

    def _is_taken(self, replica: str, view: NodeView, now_s: float) -> bool:
        """Return True if another node has a live offer of the replica."""
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
        """Set the job and weight version that an offered replica runs now."""
        if replica in view.offers:
            view.offers[replica] = replace(view.offers[replica], job=job, policy_version=version)
            self._forget_live()

    def live_offers(self, now_s: float) -> Mapping[str, Offer]:
        """Return the offers that have not expired by replica id, in the order of the ids.

        The result is cached until an offer changes or may have expired.
        """
        if self._live is None or now_s >= self._live_until_s:
            live: list[Offer] = []
            # A node that reports meanwhile extends its offers: until then none expires.
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


class Relays:
    """URLs of the nodes that relay weights in each cluster, as last sent on each stream."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[str, ...]] = {}
        self._until_s = -math.inf

    def changed(self) -> None:
        """Make the next `told` compute the relay lists anew: a node attached, detached, or was
        heard again after a silence.
        """
        self._until_s = -math.inf

    def told(self, nodes: Callable[[], Sequence[NodeView]], now_s: float) -> list[Command]:
        """Return commands for the streams whose list of relay URLs changed.

        The lists are computed only after `changed` or once a relay may be silent for 3 s. nodes:
        returns the attached nodes.
        """
        if now_s < self._until_s:
            return []
        return self._tell(nodes(), now_s)

    def _tell(self, nodes: Sequence[NodeView], now_s: float) -> list[Command]:
        # Until the first of them may have fallen silent, or `changed` is called.
        heard_s = [view.heard_s for view in nodes if now_s < view.heard_s + LAPSED_S]
        self._until_s = min(heard_s, default=math.inf) + LAPSED_S
        live: dict[str, list[str]] = {}
        for view in nodes:
            if view.hello.relay_url and now_s < view.heard_s + LAPSED_S:
                live.setdefault(view.hello.cluster, []).append(view.hello.relay_url)
        urls_of = {cluster: tuple(sorted(set(urls))) for cluster, urls in live.items()}
        wanted = {view.stream: urls_of.get(view.hello.cluster, ()) for view in nodes}
        changed = {s: urls for s, urls in wanted.items() if urls != self._told.get(s, ())}
        self._told = wanted
        return [
            Command(stream, pb.NodeCommand(relays=pb.Relays(urls=urls)))
            for stream, urls in changed.items()
        ]
