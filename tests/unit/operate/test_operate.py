"""A fleet as operators see it, and the proof of a stop."""

from typing import Any

import msgspec
import pytest

from rose.operate.fleet import Fleet, Mode, NodeState, fleet_of, names
from rose.operate.stop import MEASURED_S, Proof, proof_of
from rose.rpc import rose_pb2 as pb


def snapshot(**more: Any) -> pb.SnapshotReply:
    fields: dict[str, Any] = {
        "release": "0.3.0",
        "harvest": pb.HARVEST_MODE_ACTIVE,
        "nodes": [
            pb.AttachedNode(
                node="n0", silent_s=0.4, release="0.3.0", obeys=True, obeyed_s=0.04, replicas=["g0"]
            ),
            pb.AttachedNode(node="n1", silent_s=9.0, release="0.2.9"),
        ],
        "away": [pb.AwayNode(node="n2", away_s=60.0)],
        "hosts": [
            pb.HostTelemetry(node="n0", ttft_p95_s=0.3, ttft_target_s=0.2, tpot_target_s=0.1)
        ],
        "replicas": [pb.Replica(id="g0", kind=1, node="n0", job="grpo", held_job="old")],
        "leases": [pb.LeaseView(job="grpo", replica="g0", epoch=7, state="active")],
        "guests": [pb.GuestTelemetry(replica="g0", mode="freeze", reason="kv_pressure")],
        "jobs": [pb.JobView(job="grpo")],
    }
    return pb.SnapshotReply(**{**fields, **more})


def test_nodes_are_attached_silent_or_away_and_those_of_other_releases_are_known() -> None:
    fleet = fleet_of(snapshot())
    assert [(node.name, node.state) for node in fleet.nodes] == [
        ("n0", NodeState.ATTACHED),
        ("n1", NodeState.SILENT),
        ("n2", NodeState.AWAY),
    ]
    assert [node.name for node in fleet.skewed] == ["n1"]
    assert [node.confirmed_s for node in fleet.nodes] == [0.04, None, None]


def test_a_figure_that_nobody_said_is_unknown() -> None:
    fleet = fleet_of(snapshot())
    [n0, *_] = fleet.nodes
    [host] = n0.hosts
    assert (host.busy_share, host.kv_share, host.source) == (None, None, "unknown")
    assert n0.strain == host.strain == pytest.approx(1.5)
    [g0] = fleet.replicas
    assert g0.engine is not None
    assert (g0.engine.held_bytes, g0.engine.lend_bytes) == (None, None)
    [job] = fleet.jobs
    assert (job.turns, job.owed_tokens, job.max_guests, job.run) == (None, None, None, None)


@pytest.mark.parametrize("state", ["backoff", "failed"])
def test_an_engine_that_does_not_start_names_where_the_reason_is(state: str) -> None:
    [g0] = fleet_of(snapshot(guests=[pb.GuestTelemetry(replica="g0", state=state)])).replicas
    assert g0.engine is not None
    assert "the node's log says why" in g0.engine.why


def test_an_older_schedulers_nodes_are_those_of_its_hosts_and_replicas() -> None:
    old = snapshot(nodes=[], release="", replicas=[pb.Replica(id="g9", kind=1, node="n9")])
    fleet = fleet_of(old)
    assert [(node.name, node.heard_s) for node in fleet.nodes] == [
        ("n0", None),
        ("n2", 60.0),
        ("n9", None),
    ]
    assert fleet.skewed == []


def test_a_guest_whose_offer_ran_out_is_still_its_nodes() -> None:
    [g0] = fleet_of(snapshot(replicas=[])).replicas
    assert (g0.node, g0.kind, g0.is_guest) == ("n0", "unknown", True)


def test_a_mode_of_its_own_stands_at_the_replica() -> None:
    own = [pb.HarvestOverride(replica="g0", mode=pb.HARVEST_MODE_HOLD_AND_DRAIN)]
    fleet = fleet_of(snapshot(overrides=own))
    assert fleet.replicas[0].mode is Mode.DRAIN
    assert fleet.overrides == {"g0": Mode.DRAIN}


def test_names_that_scripts_read_stay() -> None:
    said = msgspec.to_builtins(fleet_of(snapshot()))
    assert {*said} >= {"release", "harvest", "overrides", "nodes", "replicas", "jobs", "troubles"}
    [node, *_] = said["nodes"]
    assert {*node} >= {"name", "state", "heard_s", "release", "confirmed_s", "hosts", "capacity"}
    [host] = node["hosts"]
    assert {*host} >= {"ttft_p95_s", "ttft_target_s", "tpot_p95_s", "kv_share"}
    [replica] = said["replicas"]
    assert {*replica} >= {"name", "kind", "node", "job", "version", "lease", "engine", "healthy"}
    assert replica["engine"]["why"] == "kv_pressure (the host needs its KV cache)"
    assert (replica["held_job"], replica["lease"]["epoch"]) == ("old", 7)


def test_of_many_names_a_few_are_said() -> None:
    fleet: Fleet = fleet_of(
        pb.SnapshotReply(nodes=[pb.AttachedNode(node=f"n{number}") for number in range(9)])
    )
    assert names(fleet.nodes) == "n0, n1, n2, n3, n4 and 4 more"
    assert names(fleet.nodes[:2]) == "n0, n1"


# ---- proof ----


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
