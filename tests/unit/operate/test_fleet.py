"""One read model of the fleet: what nobody said is unknown, and its names are what scripts read."""

from typing import Any

import msgspec
import pytest

from rose.operate.fleet import Fleet, Mode, NodeState, fleet_of, names
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
