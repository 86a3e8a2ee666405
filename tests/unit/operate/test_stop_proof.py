"""A stop is proved by those who confirm and measure it; whoever says nothing is named."""

from typing import Any

import pytest

from rose.operate.fleet import fleet_of
from rose.operate.stop import MEASURED_S, Proof, proof_of
from rose.rpc import rose_pb2 as pb

GONE: dict[str, Any] = {"state": "stopped", "held_bytes": 0}
THERE: dict[str, Any] = {"state": "healthy", "held_bytes": 3 << 20, "duty": 0.4}


def node(name: str, obeyed_s: float | None = 0.02, **more: Any) -> pb.AttachedNode:
    fields = {"obeys": True, "silent_s": 0.2, "replicas": [f"g-{name}"], **more}
    return pb.AttachedNode(node=name, obeyed_s=obeyed_s, **fields)


def proof(
    nodes: list[pb.AttachedNode],
    guests: dict[str, dict[str, Any]],
    away: list[pb.AwayNode] | None = None,
) -> Proof:
    told = [pb.GuestTelemetry(replica=f"g-{name}", **said) for name, said in guests.items()]
    offered = [pb.Replica(id=each.replica, kind=1, node=each.replica[2:]) for each in told]
    return proof_of(
        fleet_of(pb.SnapshotReply(nodes=nodes, guests=told, replicas=offered, away=away or []))
    )


def test_all_held_and_all_gone_is_proved() -> None:
    found = proof([node("a"), node("b", 0.041)], {"a": GONE, "b": GONE})
    assert found.proved
    assert found.settled(0.0)
    assert [*found.lines(1.24)] == [
        "held 2/2 nodes, slowest 41 ms",
        "stopped 2/2 guests in 1.2 s: 0 bytes held, duty 0%",
    ]


@pytest.mark.parametrize(
    ("silent_s", "settled"), [(0.2, False), (4.0, False), (5.1, True)], ids=str
)
def test_a_node_that_confirms_nothing_is_named_and_waited_for_until_it_surely_lends_nothing(
    silent_s: float, settled: bool
) -> None:
    # Its last report before the silence is of a guest that worked.
    found = proof([node("a"), node("b", None, silent_s=silent_s)], {"a": GONE, "b": THERE})
    assert not found.proved
    assert found.settled(9.0) is settled
    assert found.held == 1
    assert [(each.node, each.guests) for each in found.unheard] == [("b", ("g-b",))]
    assert bool(found.left) is (silent_s < 3.0)


def test_a_node_that_confirmed_and_measured_before_it_fell_silent_is_proved() -> None:
    assert proof([node("a", silent_s=4.0)], {"a": GONE}).proved
    assert not proof([node("a", silent_s=4.0)], {"a": THERE}).proved


def test_a_guest_that_is_there_is_left_and_never_settled() -> None:
    found = proof([node("a")], {"a": THERE})
    assert not found.settled(99.0)
    assert str(found.left[0]) == "g-a: healthy, holds 3.0 MiB, duty 40%"
    held = {"state": "stopped", "held_bytes": 1}
    assert proof([node("a")], {"a": held}).left


def test_a_guest_that_nobody_measured_is_waited_for_a_moment() -> None:
    found = proof([node("a")], {"a": {"state": "stopped"}})
    assert found.unmeasured == ("g-a",)
    assert not found.settled(MEASURED_S / 2)
    assert found.settled(MEASURED_S + 0.1)
    assert not found.proved


def test_a_node_of_an_older_release_confirms_nothing_and_its_measurement_counts() -> None:
    found = proof([node("a", None, obeys=False)], {"a": GONE})
    assert found.proved
    assert (found.held, found.nodes, found.older) == (0, 1, ("a",))
    assert "of an older release, which confirms nothing: a" in [*found.lines(0.1)]


def test_a_known_node_that_is_not_attached_is_unproved() -> None:
    found = proof([], {}, away=[pb.AwayNode(node="n0", away_s=2.0)])
    assert not found.settled(1.0)
    assert not found.proved
    unheard, held, last = found.lines(0.1)
    assert unheard.startswith("unproved: node n0 is not attached, last heard 2 s ago")
    assert held == "held 0/1 nodes"
    assert last.endswith("1 known nodes are not attached")


def test_dedicated_replicas_belong_to_jobs_and_a_stop_leaves_them() -> None:
    told = [pb.GuestTelemetry(replica="d", **THERE)]
    rows = [pb.Replica(id="d", kind=2, node="a")]
    fleet = fleet_of(pb.SnapshotReply(nodes=[node("a")], guests=told, replicas=rows))
    assert proof_of(fleet).proved
