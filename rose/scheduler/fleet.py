"""Which nodes are attached, and what each of them last said."""

from dataclasses import dataclass, field, replace

from elastic_scheduler import Offer
from rose.rpc import rose_pb2 as pb


@dataclass(slots=True)
class NodeView:
    """One attached node; its word is void once its stream is over."""

    node: str
    stream: int
    cluster: str = ""
    relay_url: str = ""
    heard_s: float = 0.0
    offers: dict[str, Offer] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)  # replicas that it ever offered
    offered_s: float = 0.0
    telemetry: pb.Telemetry = field(default_factory=pb.Telemetry)

    def lapsed(self, now_s: float) -> list[str]:
        """Replicas whose offers ran out before the node spoke again."""
        return [name for name, each in self.offers.items() if each.is_stale(self.offered_s, now_s)]


class Fleet:
    """All attached nodes, by their streams."""

    def __init__(self) -> None:
        self._nodes: dict[int, NodeView] = {}

    @property
    def streams(self) -> list[int]:
        """Streams of all attached nodes."""
        return list(self._nodes)

    @property
    def nodes(self) -> list[NodeView]:
        """All attached nodes."""
        return list(self._nodes.values())

    def attach(self, node: str, stream: int, cluster: str, relay_url: str, now_s: float) -> None:
        """A node that has no stream yet is there now."""
        self._nodes[stream] = NodeView(node, stream, cluster, relay_url, now_s)

    def detach(self, stream: int) -> NodeView | None:
        """Forget a node; None when it is forgotten already."""
        return self._nodes.pop(stream, None)

    def of_stream(self, stream: int) -> NodeView | None:
        """The node behind a stream, None for one that was replaced or lost."""
        return self._nodes.get(stream)

    def of_node(self, node: str) -> NodeView | None:
        """The attached node of that name."""
        return next((view for view in self._nodes.values() if view.node == node), None)

    def of_replica(self, replica: str) -> NodeView | None:
        """The node that offers the replica."""
        return next((view for view in self._nodes.values() if replica in view.offers), None)

    def replace_offers(self, view: NodeView, offers: tuple[Offer, ...], now_s: float) -> list[str]:
        """All that a node offers now; returns the replicas that another node offers already."""
        taken = {
            replica
            for other in self._nodes.values()
            if other is not view
            for replica, offer in other.offers.items()
            if not offer.is_stale(other.offered_s, now_s)
        }
        view.offers = {offer.replica: offer for offer in offers if offer.replica not in taken}
        view.named.update(view.offers)
        view.offered_s = now_s
        return [offer.replica for offer in offers if offer.replica in taken]

    def set_version(self, view: NodeView, replica: str, version: int) -> None:
        """A replica runs another version than its offer says."""
        if replica in view.offers:
            view.offers[replica] = replace(view.offers[replica], policy_version=version)

    def live_offers(self, now_s: float) -> list[Offer]:
        """Offers that have not run out, by replica id."""
        live = [
            offer
            for view in self._nodes.values()
            for offer in view.offers.values()
            if not offer.is_stale(view.offered_s, now_s)
        ]
        return sorted(live, key=lambda offer: offer.replica)
