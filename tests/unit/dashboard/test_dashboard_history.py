"""History and journal: what a guest did beside its host's latency, bounded, of one term."""

from elastic_scheduler import HarvestMode
from rose.dashboard.history import FLEET_LINES, NODE_LINES, SAMPLES, History, RequestLedger
from rose.dashboard.journal import KEPT, Journal, folded
from rose.dashboard.model import Model, Moment
from rose.dashboard.pages import series_at
from tests.harness.dashboard_fleet import WALL_S, DashboardFleet


def played(seconds: int, nodes: int = 10) -> tuple[DashboardFleet, History]:
    fleet, history = DashboardFleet(nodes), History()
    for _ in range(seconds):
        fleet.play()
        history.take(fleet.observed(), fleet.now_s, WALL_S + fleet.now_s)
    return fleet, history


def model_of(fleet: DashboardFleet, history: History) -> Model:
    at_s = WALL_S + fleet.now_s
    return Model(Moment(fleet.observed(), Journal().read(at_s), at_s), history)


def test_latency_and_duty_of_a_node_share_one_time_axis() -> None:
    fleet, history = played(8)
    times, lines = history.node("serving-0000")
    assert times == [WALL_S + 1_000 + n for n in (1, 3, 5, 7)]
    assert [len(line) for line in lines] == [4] * len(NODE_LINES)
    by_name = dict(zip(NODE_LINES, lines, strict=True))
    assert all(0.2 <= value <= 0.3 for value in by_name["ttft_s"] if value is not None)
    assert all(value is not None for value in by_name["duty"][1:])
    assert by_name["tok_s"][-1] == 1_600.0
    series = series_at(model_of(fleet, history), {"node": "serving-0000"})
    assert series is not None
    charts = series["charts"]
    assert isinstance(charts, dict)
    assert charts["latency"][0] == charts["guest"][0] == times
    assert charts["latency"][2] == [500.0] * 4  # its target, beside it
    assert len(charts["latency"]) == 5
    assert len(charts["guest"]) == 4
    assert series_at(model_of(fleet, history), {"node": "nobody"}) is None


def test_the_fleet_counts_hosts_that_are_late_beside_what_is_lent() -> None:
    _, history = played(6)
    _, lines = history.fleet()
    by_name = dict(zip(FLEET_LINES, lines, strict=True))
    assert by_name["late"] == [1.0] * 3
    assert by_name["lending"][-1] == 6.0


def test_a_guest_that_is_stopped_is_a_tick_with_its_reason() -> None:
    fleet, history = played(30)
    changes = history.changes("serving-0000")
    assert [(each.before, each.after) for each in changes[:4]] == [
        ("freeze", "run"), ("freeze", "run"), ("run", "freeze"), ("run", "freeze"),
    ]  # fmt: skip
    assert {each.reason for each in changes if each.is_stop} == {"host_waits"}
    series = series_at(model_of(fleet, history), {"node": "serving-0000"})
    assert series is not None
    assert "serving-0000/g0: freeze, host_waits" in str(series["ticks"])


def test_history_is_bounded_and_forgets_nodes_that_are_gone() -> None:
    fleet, history = played(2, nodes=3)
    seen = fleet.observed()
    for number in range(2 * SAMPLES):
        history.take(seen, 2_000.0 + 2 * number, WALL_S + 2_000.0 + 2 * number)
    times, _ = history.node("serving-0000")
    assert len(times) == SAMPLES
    assert times == sorted(times)
    fleet.leave(0)
    seen = fleet.observed()
    history.take(seen, 9_000.0, WALL_S + 9_000.0)
    assert history.node("serving-0000")[1][0][-1] is None  # away: nothing is known
    fleet.now_s += 86_401.0
    history.take(fleet.observed(), 99_000.0, WALL_S + 99_000.0)
    assert all(value is None for value in history.node("serving-0000")[1][0])


def test_misses_beside_a_guest_are_told_apart_from_those_without_one() -> None:
    ledger = RequestLedger()
    ledger.add(10, 90, 10, lends=True)
    ledger.add(11, 99, 1, lends=False)
    lent, alone = ledger.spent(11, 60)
    assert (lent.missed, alone.missed) == (0.1, 0.01)
    assert ledger.spent(11, 1)[0].missed is None
    burn = ledger.burn(11, 60)
    assert burn is not None
    assert abs(burn - 5.5) < 1e-9  # 11 of 200 at an objective of 99%
    assert RequestLedger().burn(11, 60) is None


def test_requests_before_the_first_look_are_nobodys() -> None:
    fleet, history = played(1)
    assert all(ledger.spent(history.minute, 60)[0].missed is None
               for ledger in history.ledgers.values())  # fmt: skip
    fleet.play(4)
    history.take(fleet.observed(), fleet.now_s, WALL_S + fleet.now_s)
    lent, _ = history.ledgers["chat-0"].spent(history.minute, 60)
    assert lent.good == 400 * 3  # serving-0000, -0003 and what is late, four seconds


def test_the_journal_keeps_the_newest_and_leases_push_nothing_out() -> None:
    journal = Journal()
    assert journal.heard("SetHarvestRequest", {"mode": "hold", "answer": 3}, "operator ada", 60.0)
    for number in range(3 * KEPT):
        assert not journal.heard(
            "lease_granted", {"replica": f"r{number}", "why": "gain"}, "", 60.0 + number / 100
        )
    read = journal.read(120.0)
    assert len(read.leases) == KEPT
    assert read.leases[0].said == f"replica r{3 * KEPT - 1}, why gain"
    assert sum(minute["granted"] for minute in read.minutes) == 3 * KEPT
    act = read.last_act
    assert act is not None
    assert (act.what, act.by, act.said) == ("harvest set", "operator ada", "mode hold, released 3")
    assert journal.read(6_000.0).minutes == ()


def test_versions_are_kept_apart_said_once_and_folded() -> None:
    journal = Journal()
    for version in range(1, 400):
        for job in ("grpo", "dapo"):
            fields = {"job": job, "version": version, "parent": version - 1}
            journal.heard("version_announced", fields, "trainer ada", float(version))
            journal.heard("AnnounceVersionRequest", fields, "trainer ada", float(version))
    journal.heard("capacity_held", {"node": "n0", "why": "busy"}, "", 1.0)
    for at_s in (2.0, 3.0):
        journal.heard("policy_applied", {"policy": {"name": "p"}}, "operator ada", at_s)
        said = {"policy": '{"name": "p", "mode": "Active"}'}
        journal.heard("ApplyPolicyRequest", said, "operator ada", at_s)
        journal.heard("capacity_held", {"node": "n0", "why": "busy"}, "", at_s + 0.5)
    read = journal.read(400.0)
    assert len(read.versions) == KEPT, "each came as a record of the core and as a request"
    assert [(each.said, each.times) for each in folded(read.versions)] == [
        ("job dapo, version 399, parent 398", KEPT // 2),
        ("job grpo, version 399, parent 398", KEPT // 2),
    ]
    assert [(each.event, each.said, each.times) for each in folded(read.decisions)] == [
        ("capacity_held", "why busy", 3),
        ("policy_applied", "policy p", 1),
        ("policy_applied", "policy p", 1),
    ]
    assert {each.caller for each in read.decisions} == {"operator ada", "the scheduler"}
    for mode in ("hold", "active"):
        journal.heard("SetHarvestRequest", {"mode": mode}, "operator ada", 500.0)
    acts = folded(journal.read(500.0).decisions)[:2]
    assert [each.said for each in acts] == ["mode active", "mode hold"]
    assert [each.since_s for each in folded(read.decisions)] == [1.0, 3.0, 2.0]


def test_a_policy_is_named_and_not_printed() -> None:
    journal = Journal()
    journal.heard("policy_applied", {"policy": {"name": "p", "tenants": ["x"] * 999}}, "", 0.0)
    journal.heard("capacity_held", {"node": "n0", "why": "w" * 9_000}, "", 1.0)
    newest, first = journal.read(1.0).decisions
    assert first.said == "policy p"
    assert newest.node == "n0"
    assert len(newest.said) <= 400


def test_a_stop_is_seen_with_what_it_leaves() -> None:
    fleet, history = played(4)
    fleet.set_harvest(HarvestMode.OFF)
    model = model_of(fleet, history)
    assert model.states["lending"] == 0
    # One that no policy matches advises still.
    assert (model.states["off"], model.states["advisory"]) == (8, 2)
