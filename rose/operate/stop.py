"""A stop and its proof: who confirmed it, whose guests are measured to be gone, who says nothing.

    stop set ──► each node: told, confirms (held)          ──► its guests hand turns back and end
             ──► each guest: measured to hold and do nothing (gone)

No IO: `proof_of` judges one look at the fleet; whoever takes looks does so until `settled`, or a
deadline. A node that nobody can ask proves nothing, and lends nothing either once it has heard no
scheduler for `staleAfter`: it is named, and so is where to measure it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rose.operate.fleet import Fleet, Node, NodeState, Replica

# The longest `staleAfter` that a policy may say: a node without a scheduler lends nothing then.
STALE_AFTER_S: Final = 5.0
# A node that takes part in the proof measures its guests well within this.
MEASURED_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Unheard:
    """A node of which no confirmation is known. state: attached, silent or away."""

    node: str
    state: NodeState
    heard_s: float | None
    guests: tuple[str, ...]

    def __str__(self) -> str:
        """For a person."""
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
class Left:
    """A guest that is there still, as its node measured it."""

    replica: str
    node: str
    state: str
    held_bytes: int | None
    duty: float

    def __str__(self) -> str:
        """For a person."""
        held = f"{(self.held_bytes or 0) / (1 << 20):.1f} MiB"
        return f"{self.replica}: {self.state}, holds {held}, duty {self.duty:.0%}"


@dataclass(frozen=True, slots=True)
class Proof:
    """What one look shows. nodes: all that are known; held: those that confirmed the stop.

    slowest_s: of those, from telling it to its word. older: attached nodes of an earlier release,
    which never confirm. unmeasured: guests of attached nodes of which nobody said what they hold.
    """

    nodes: int
    held: int
    slowest_s: float | None
    unheard: tuple[Unheard, ...]
    older: tuple[str, ...]
    guests: int
    left: tuple[Left, ...]
    unmeasured: tuple[str, ...]

    def settled(self, waited_s: float) -> bool:
        """Whether another look can show nothing more."""
        measured = not self.unmeasured or waited_s > MEASURED_S
        heard = all(
            node.state is not NodeState.ATTACHED and (node.heard_s or 0.0) > STALE_AFTER_S
            for node in self.unheard
        )
        return measured and heard and not self.left

    @property
    def proved(self) -> bool:
        """Whether every known node is accounted for and every guest measured to be gone."""
        return not (self.unheard or self.unmeasured or self.left)

    def lines(self, took_s: float) -> Iterable[str]:
        """For a person: what is not as it should be, then how many held and how many are gone."""
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
    """Judge one look at a fleet in which a stop is in force."""
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
            Unheard(n.name, n.state, n.heard_s, tuple(each.name for each in guests[n.name]))
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


def _unheard(node: Node, guests: list[Replica]) -> bool:
    """Whether nobody can say of this node that it holds and that nothing is left on it."""
    if node.state is NodeState.AWAY:
        return True
    if node.state is NodeState.ATTACHED:
        return node.confirms and node.confirmed_s is None
    # What it measured before it fell silent counts, if that was after it had confirmed.
    held = node.confirmed_s is not None
    return not held or any(left_of(guest) is not None for guest in guests)


def left_of(replica: Replica) -> Left | None:
    """What is left of a guest; None for nothing."""
    engine = replica.engine
    if engine is None:
        return None
    if engine.held_bytes or engine.duty > 0 or engine.state in ("healthy", "starting"):
        return Left(replica.name, replica.node, engine.state, engine.held_bytes, engine.duty)
    return None
