"""Tables of a fleet: a row each, what is unknown as a dash, what is wrong before all else."""

import io
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from rich.console import Console

from rose.cli.cluster.policy import NodePolicy, explained
from rose.cli.cluster.top import Frame, Rates, bar, fitted_view, frame_view
from rose.cli.tables import (
    REPLICA_COLUMNS,
    headlines,
    nodes_table,
    replicas_table,
    tpot,
    ttft,
    version,
)
from rose.command_line.output import Table, Tone, TonedText, rendered, text_of
from rose.operate.fleet import Engine, Fleet, HostRow, NodeStatus, ReplicaRow, capacity_of, fleet_of
from rose.rpc import rose_pb2 as pb

GIB = 1 << 30
HOST = HostRow("", "plugin", 3, 1, 0.31, 0.5, 0.41, 0.5, 0.03, 0.15, 40, 10.0)


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


def nodes(*found: NodeStatus) -> list[dict[str, str]]:
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
    assert ttft(HOST) == TonedText("410 / 500 ms", Tone.CARE)
    assert ttft(replace(HOST, ttft_p95_s=0.6)) == TonedText("600 / 500 ms MISSED", Tone.BAD)
    assert tpot(HOST) == TonedText("30.0 / 150 ms", Tone.GOOD)
    idle = replace(HOST, tpot_p95_s=0.0, window_requests=0)
    assert tpot(idle) == TonedText("idle / 150 ms", Tone.FAINT)


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


# ---- top ----


def top_fleet(**tokens: int) -> Fleet:
    """Three hosts, of which `late` misses its target; each has a guest."""
    ttft = {"calm": 0.1, "late": 0.6, "near": 0.45}
    at_work: dict[str, Any] = {"state": "healthy", "mode": "run", "reason": "ok", "duty": 0.62}
    return fleet_of(
        pb.SnapshotReply(
            harvest=pb.HARVEST_MODE_ACTIVE,
            nodes=[pb.AttachedNode(node=name, replicas=[f"g-{name}"]) for name in ttft],
            hosts=[
                pb.HostTelemetry(node=name, ttft_p95_s=at_s, ttft_target_s=0.5, busy_share=0.3)
                for name, at_s in ttft.items()
            ],
            replicas=[pb.Replica(id=f"g-{name}", kind=1, node=name) for name in ttft],
            guests=[
                pb.GuestTelemetry(replica=f"g-{name}", tokens_total=tokens.get(name, 0), **at_work)
                for name in ttft
            ],
        )
    )


def rows(frame: Frame, node: str = "") -> list[list[str]]:
    (table,) = frame_view(frame, node).tables
    return [[str(cell) for cell in row] for row in table.rows]


def test_whoever_misses_its_target_stands_first_with_its_guests_beneath() -> None:
    found = rows(Frame(top_fleet(), {}))
    assert [row[0] for row in found] == ["late", "  g-late", "near", "  g-near", "calm", "  g-calm"]
    assert found[0][1] == "600 / 500 ms MISSED"
    assert found[1][3] == "██████···· 62% duty"
    assert found[1][6] == "run"
    assert found[1][7].startswith("ok (its grant holds")
    assert [row[0] for row in rows(Frame(top_fleet(), {}), "near")] == ["near", "  g-near"]


def test_rates_are_of_the_time_between_two_frames() -> None:
    now = iter([10.0, 12.0, 14.0])
    rates = Rates(lambda: next(now))
    assert rates.frame(top_fleet(late=100)).tok_s == {}
    assert rates.frame(top_fleet(late=500)).tok_s == {"g-calm": 0.0, "g-late": 200.0, "g-near": 0.0}
    begun_anew = rates.frame(top_fleet(late=3))
    assert "g-late" not in begun_anew.tok_s
    assert rows(begun_anew)[1][5] == "-"


def test_of_more_rows_than_lines_it_is_said_how_many_are_left_out() -> None:
    view = frame_view(Frame(top_fleet(), {}), "")
    drawn = text_of(fitted_view(view, 8))
    assert "g-late" in drawn
    assert "calm" not in drawn
    assert "3 more rows: make the terminal higher, or give --node" in drawn
    assert "more rows" not in text_of(fitted_view(view, 30))


@pytest.mark.parametrize(
    ("width", "dropped"),
    [(80, "no room for TPOT P95/TARGET, LOAD, KV, TOKENS/S"), (120, ""), (140, "")],
)
def test_a_narrow_terminal_shows_whole_words(width: int, dropped: str) -> None:
    view = frame_view(Frame(top_fleet(), {}), "")
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    console.print(rendered(view))
    assert isinstance(console.file, io.StringIO)
    drawn = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, drawn)) <= width
    assert (drawn[-1] if "no room" in drawn[-1] else "") == dropped
    whole = {word for row in rows(Frame(top_fleet(), {})) for cell in row for word in cell.split()}
    head = next(at for at, line in enumerate(drawn) if line.startswith("NODE"))
    shown = {word for line in drawn[head + 1 : head + 7] for word in line.split()}
    assert shown - whole == ({"…"} if "…" in shown else set())
    assert "MISSED" in shown
    assert "run" in shown


def test_a_bar_is_never_longer_than_its_frame() -> None:
    assert [bar(share) for share in (None, 0.0, 0.5, 1.0, 7.0)] == [
        "·" * 10,
        "·" * 10,
        "█" * 5 + "·" * 5,
        "█" * 10,
        "█" * 10,
    ]


# ---- policy explain ----

NOON = datetime(2026, 11, 23, 12, 0)


def row(**more: object) -> pb.NodeCapacity:
    fields: dict[str, object] = {
        "node": "serving-0",
        "mode": pb.HARVEST_MODE_OFF,
        "would": pb.HARVEST_MODE_ACTIVE,
        "lend_bytes": 40 * GIB,
        "lend_compute": 0.7,
        "advised_s": 10_080.0,
        "advised_byte_s": 38.0 * GIB * 10_080,
        "advised_compute_s": 0.61 * 10_080,
        "limits": ["watermarks.high (kv 83% > 80%)"],
    }
    return pb.NodeCapacity(**{**fields, **more})  # type: ignore[arg-type]


def said(of: pb.NodeCapacity, *guests: ReplicaRow) -> list[str]:
    return [*explained(NodePolicy("serving-0", capacity_of(of), guests), lambda: NOON)]


def test_the_first_line_says_how_much_since_when_and_what_holds_it_back() -> None:
    assert said(row())[0] == (
        "serving-0: would harvest 38.0 GiB, 61% of compute since 09:12;"
        " held back by watermarks.high (kv 83% > 80%)"
    )


def test_a_node_that_may_lend_is_told_apart_and_yesterday_has_its_date() -> None:
    lends = row(mode=pb.HARVEST_MODE_ACTIVE, limits=[], advised_s=86_400.0)
    assert said(lends)[0].startswith("serving-0: may harvest 4.4 GiB, 7% of compute since Nov 22,")


def test_before_there_is_an_average_the_figures_are_of_now() -> None:
    assert "would harvest 40.0 GiB, 70% of compute now" in said(row(advised_s=3.0))[0]
    silent = pb.NodeCapacity(node="serving-0", would=pb.HARVEST_MODE_ACTIVE)
    assert said(silent)[0] == "serving-0: would harvest what its node has not said yet"


def test_its_load_and_each_guests_reason_follow() -> None:
    engine = Engine("healthy", 0, "freeze", "kv_pressure", "the host needs it", 0, 0, 0, 0, 0, 0, 0)
    guest = ReplicaRow("g0", "guest", "serving-0", "", True, "", 0, "", "", None, None, engine)
    lines = said(row(busy_share=0.31, kv_share=0.83), guest)
    assert lines[1] == (
        "  lends nothing; an Active policy would: lends; its host works 31% of the time;"
        " its host's KV cache is 83% full"
    )
    assert "  g0: freeze, duty 0%: the host needs it" in lines


@pytest.mark.parametrize(
    ("late", "kept", "why"),
    [
        ("version 2: no signature", "", "not at the newest weights: version 2: no signature"),
        ("", "its pools are not ROSE's", "gives no KV memory back: its pools are not ROSE's"),
    ],
)
def test_a_replica_says_what_it_lacks(late: str, kept: str, why: str) -> None:
    engine = Engine("healthy", 0, "run", "", "", 1, 0, 0, 0, 0, 0, None, late, kept)
    guest = ReplicaRow("g0", "guest", "serving-0", "", True, "", 1, "", "", None, None, engine)
    assert replicas_table([guest]).rows[0][REPLICA_COLUMNS.index("WHY")] == why
