"""Proof of a stop: nodes that confirmed it, guests measured to be gone, nodes that are silent.

    stop set ──► each node: told, confirms (held)          ──► its guests hand turns back and end
             ──► each guest: measured to hold and do nothing (gone)

No IO: `proof_of` judges one look at the fleet; its caller takes looks until `settled`, or a
deadline. A silent node proves nothing, and lends nothing either once it has heard no scheduler for
`staleAfter`: the report names the node, and the command that measures it there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rose.operate.fleet import Fleet, NodeState, NodeStatus, ReplicaRow

# The longest `staleAfter` that a policy may say: a node without a scheduler lends nothing then.
STALE_AFTER_S: Final = 5.0
# A node that takes part in the proof measures its guests well within this.
MEASURED_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class UnheardNode:
    """Node that is not proved to have stopped, with the names of its guests.

    Its text is a report line. heard_s: seconds since its last message.
    """

    node: str
    state: NodeState
    heard_s: float | None
    guests: tuple[str, ...]

    def __str__(self) -> str:
        if self.state is NodeState.ATTACHED:
            return (
                f"not confirmed: node {self.node} is attached, and has not said that it holds;"
                " `rose kill RUN_DIR` there needs nobody's word"
            )
        heard_s = self.heard_s or 0.0
        away = self.state is NodeState.AWAY
        what = "is not attached" if away else "is silent, and has not confirmed"
        lends = (
            "it holds no lease any more, and lends nothing"
            if heard_s > STALE_AFTER_S
            else f"it lends nothing from staleAfter ({STALE_AFTER_S:g} s) on"
        )
        return (
            f"unproved: node {self.node} {what}, last heard {heard_s:.0f} s ago: {lends};"
            " `rose kill RUN_DIR` there measures its guest"
        )


@dataclass(frozen=True, slots=True)
class RemainingGuest:
    """Guest that still exists after a stop, as its node measured it. Its text is a report line."""

    replica: str
    node: str
    state: str
    held_bytes: int | None
    duty: float

    def __str__(self) -> str:
        held = f"{(self.held_bytes or 0) / (1 << 20):.1f} MiB"
        return f"{self.replica}: {self.state}, holds {held}, duty {self.duty:.0%}"


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of one look at a fleet after a stop. held: number of nodes that confirmed it.

    nodes: number of known nodes. slowest_s: longest time from order to confirmation. unheard: nodes
    not proved to have stopped. older: attached nodes of an old release, which never confirm. left:
    guests that still exist. unmeasured: guests of attached nodes without a measurement.
    """

    nodes: int
    held: int
    slowest_s: float | None
    unheard: tuple[UnheardNode, ...]
    older: tuple[str, ...]
    guests: int
    left: tuple[RemainingGuest, ...]
    unmeasured: tuple[str, ...]

    def settled(self, waited_s: float) -> bool:
        """Return True if waiting longer than `waited_s` cannot prove more."""
        measured = not self.unmeasured or waited_s > MEASURED_S
        heard = all(
            node.state is not NodeState.ATTACHED and (node.heard_s or 0.0) > STALE_AFTER_S
            for node in self.unheard
        )
        return measured and heard and not self.left

    @property
    def proved(self) -> bool:
        """True if no node is unheard, and every guest was measured to be gone."""
        return not (self.unheard or self.unmeasured or self.left)

    def lines(self, took_s: float) -> Iterable[str]:
        """Yield the report's lines: exceptions, then nodes that hold and guests that are gone."""
        yield from map(str, self.left)
        yield from map(str, self.unheard)
        if self.unmeasured:
            whose = ", ".join(self.unmeasured)
            yield f"unproved: {whose}: nobody measured what is left; ask its node"
        if self.older:
            yield f"of an older release, which confirms nothing: {', '.join(self.older)}"
        slowest = "" if self.slowest_s is None else f", slowest {self.slowest_s * 1e3:.0f} ms"
        yield f"held {self.held}/{self.nodes} nodes{slowest}"
        away = sum(each.state is NodeState.AWAY for each in self.unheard)
        also = f"; {away} known nodes are not attached" if away else ""
        yield (
            f"stopped {self.guests - len(self.left)}/{self.guests} guests in {took_s:.1f} s:"
            f" 0 bytes held, duty 0%{also}"
        )


def proof_of(fleet: Fleet) -> Proof:
    """Return the proof of a stop that one look at the fleet gives."""
    guests = {
        node: [replica for replica in replicas if replica.is_guest]
        for node, replicas in fleet.by_node().items()
    }
    unheard = [node for node in fleet.nodes if _unheard(node, guests[node.name])]
    lost = {node.name for node in unheard if node.state is not NodeState.ATTACHED}
    asked = [r for r in fleet.replicas if r.is_guest and r.node not in lost]
    times_s = [node.confirmed_s for node in fleet.nodes if node.confirmed_s is not None]
    return Proof(
        nodes=len(fleet.nodes),
        held=len(times_s),
        slowest_s=max(times_s, default=None),
        unheard=tuple(
            UnheardNode(n.name, n.state, n.heard_s, tuple(each.name for each in guests[n.name]))
            for n in unheard
        ),
        older=tuple(
            node.name
            for node in fleet.nodes
            if node.state is not NodeState.AWAY and not node.confirms
        ),
        guests=sum(replica.engine is not None for replica in asked),
        left=tuple(left for replica in asked if (left := left_of(replica)) is not None),
        unmeasured=tuple(
            replica.name
            for replica in asked
            if replica.engine is None or replica.engine.held_bytes is None
        ),
    )


def _unheard(node: NodeStatus, guests: list[ReplicaRow]) -> bool:
    """Return True if the node is not known to hold with nothing left on it."""
    if node.state is NodeState.AWAY:
        return True
    if node.state is NodeState.ATTACHED:
        return node.confirms and node.confirmed_s is None
    # A silent node's last measurement counts if the node had confirmed before.
    held = node.confirmed_s is not None
    return not held or any(left_of(guest) is not None for guest in guests)


def left_of(replica: ReplicaRow) -> RemainingGuest | None:
    """Return a guest that still runs or holds memory, None for a guest that is gone."""
    engine = replica.engine
    if engine is None:
        return None
    if engine.held_bytes or engine.duty > 0 or engine.state in ("healthy", "starting"):
        return RemainingGuest(
            replica.name, replica.node, engine.state, engine.held_bytes, engine.duty
        )
    return None
