"""Tables of a fleet: a row each, what is unknown as a dash, what is wrong before all else."""

from dataclasses import replace

from rose.cli.tables import headlines, nodes_table, replicas_table, tpot, ttft, version
from rose.command_line.output import Cell, Table, Tone
from rose.operate.fleet import Fleet, Host, Node, fleet_of
from rose.rpc import rose_pb2 as pb

HOST = Host("", "plugin", 3, 1, 0.31, 0.5, 0.41, 0.5, 0.03, 0.15, 40, 10.0)


def fleet() -> Fleet:
    row = pb.NodeCapacity(
        node="n0",
        policy_mode="Advisory",
        mode=pb.HARVEST_MODE_OFF,
        would=pb.HARVEST_MODE_ACTIVE,
        limits=["mode Advisory (chat)"],
        lend_bytes=4 << 30,
        lend_compute=0.62,
    )
    return fleet_of(
        pb.SnapshotReply(
            harvest=pb.HARVEST_MODE_ACTIVE,
            nodes=[
                pb.AttachedNode(node="n0", silent_s=0.2, release="0.3.0", replicas=["g0"]),
                pb.AttachedNode(node="n1", silent_s=7.0),
            ],
            away=[pb.AwayNode(node="n2", away_s=90.0)],
            capacity=[row],
            guests=[pb.GuestTelemetry(replica="g0", state="healthy", restarts=2)],
        )
    )


def cells(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, map(str, row), strict=True)) for row in table.rows]


def nodes(*found: Node) -> list[dict[str, str]]:
    return cells(nodes_table(fleet(), found))


def test_a_node_says_what_it_would_lend_and_what_holds_it_back() -> None:
    n0, n1, n2 = nodes(*fleet().nodes)
    assert (n0["MODE"], n0["LENDS"]) == ("off, would active", "4.0 GiB, 62%")
    assert n0["HELD BACK BY"] == "mode Advisory (chat)"
    assert (n0["TTFT P95/TARGET"], n0["BUSY"], n0["KV"]) == ("-", "-", "-")
    assert (n1["STATE"], n1["HEARD"], n1["RELEASE"]) == ("silent", "7.0 s", "-")
    assert (n2["STATE"], n2["HEARD"]) == ("away", "2 min")


def test_each_of_several_hosts_has_a_row_of_its_own() -> None:
    [n0, *_] = fleet().nodes
    several = replace(n0, hosts=(replace(HOST, name="chat"), replace(HOST, name="code", running=9)))
    assert [(row["NODE"], row["RUN+WAIT"]) for row in nodes(several)] == [
        ("n0/chat", "3+1"),
        ("n0/code", "9+1"),
    ]
    [alone] = nodes(replace(n0, hosts=(HOST,)))
    assert (alone["NODE"], alone["KV"]) == ("n0", "50%")


def test_a_latency_says_how_near_its_target_is() -> None:
    assert ttft(HOST) == Cell("410 / 500 ms", Tone.CARE)
    assert ttft(replace(HOST, ttft_p95_s=0.6)) == Cell("600 / 500 ms MISSED", Tone.BAD)
    assert tpot(HOST) == Cell("30.0 / 150 ms", Tone.GOOD)
    idle = replace(HOST, tpot_p95_s=0.0, window_requests=0)
    assert tpot(idle) == Cell("idle / 150 ms", Tone.FAINT)


def test_troubles_stand_before_everything_else() -> None:
    lines = [str(line) for line in headlines(replace(fleet(), troubles=("log: disk full",)))]
    assert lines[1:] == [
        "scheduler: log: disk full",
        "1 nodes are attached, and silent: n1",
        "1 nodes are known, and not attached: n2",
    ]


def test_a_replica_without_an_offer_is_shown_with_what_is_known() -> None:
    [g0] = fleet().replicas
    [row] = cells(replicas_table([g0]))
    assert (row["NODE"], row["KIND"], row["LEASE"]) == ("n0", "unknown", "-")
    assert row["ENGINE"] == "healthy, 2 restarts"
    assert version(replace(g0, version=3, held_job="other")) == "3 of other"
