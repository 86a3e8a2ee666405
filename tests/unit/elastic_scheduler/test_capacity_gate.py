"""Capacity gate: verdicts of nodes, holds by budget and load, and advice in figures."""

from collections.abc import Iterable

import pytest

from elastic_scheduler import HarvestMode, HarvestModes, LeaseTable, Offer, ReplicaKind
from elastic_scheduler.capacity import (
    AdviceBook,
    CapacityGate,
    CapacityNote,
    EffectivePolicy,
    Halt,
    Lendable,
    Limit,
    LimitKind,
    NodeFacts,
    cli_policy,
    policy_of,
)
from elastic_scheduler.capacity.budget_hold import (
    LONGEST_S,
    MOST_HOSTS,
    BudgetHold,
    BusyHold,
)
from elastic_scheduler.capacity.effective import MOST_STEP_S, in_canary, lendable
from elastic_scheduler.capacity.gate import SETTLE_S
from elastic_scheduler.capacity.policy import MaxHostBusy, SloBudget
from slo.error_budget import DAY_S

ACTIVE, HOLD = HarvestMode.ACTIVE, HarvestMode.HOLD
DRAIN, OFF = HarvestMode.HOLD_AND_DRAIN, HarvestMode.OFF
NOON_S = 1_700_000_000.0  # 2023-11-14 22:13 UTC


def gate(*said: dict[str, object], stop: HarvestMode = ACTIVE) -> CapacityGate:
    policies = [
        policy_of({"name": f"p{n}", "mode": "Active", **each}) for n, each in enumerate(said)
    ]
    return CapacityGate(HarvestModes(stop), policies)


def judge(
    core: CapacityGate, *nodes: str | NodeFacts, now_s: float = 0.0, wall_s: float | None = NOON_S
) -> list[CapacityNote | Halt]:
    facts = [NodeFacts(each) if isinstance(each, str) else each for each in nodes]
    core.changed()
    return core.judge(lambda: facts, now_s, wall_s)


def judged(*said: dict[str, object], stop: HarvestMode = ACTIVE) -> CapacityGate:
    """Return a gate of these policies that has judged the node n."""
    core = gate(*said, stop=stop)
    judge(core, "n")
    return core


def judge_settled(core: CapacityGate, *nodes: str | NodeFacts) -> None:
    """Once at the start, and once when all nodes had time to attach."""
    judge(core, *nodes)
    judge(core, *nodes, now_s=SETTLE_S)


def modes(core: CapacityGate) -> dict[str, HarvestMode]:
    return {verdict.node: verdict.mode for verdict in core.verdicts()}


def said(core: CapacityGate, node: str) -> list[str]:
    return [limit.text for limit in core.verdict(node).limits]


def offer(node: str, kind: ReplicaKind = ReplicaKind.GUEST) -> Offer:
    return Offer(f"g-{node}", kind, "http://h:1", node, 4096, 1e3, 1e4, 0, True, 2.0, 0, 8)


def test_without_any_policy_nothing_is_lent() -> None:
    core = judged()
    assert core.verdict("n").mode is OFF
    assert core.verdict("n").limits == (Limit(LimitKind.NO_POLICY, "no policy matches this node"),)
    own = offer("n", ReplicaKind.DEDICATED)
    assert core.plan([offer("n"), own], []).lease == (own,), "dedicated replicas are the job's"


def test_the_policy_of_the_command_line_lends_all() -> None:
    core = CapacityGate(HarvestModes(ACTIVE), [cli_policy()])
    assert judge(core, "n") == [], "and says nothing new"
    assert core.plan([offer("n")], []).lease == (offer("n"),)


def test_a_node_that_was_not_judged_yet_lends_nothing() -> None:
    assert gate({}).plan([offer("new")], []).lease == ()


@pytest.mark.parametrize("stop", [HOLD, DRAIN, OFF])
def test_the_operators_stop_stands_above_every_policy(stop: HarvestMode) -> None:
    core = judged({}, stop=stop)
    assert core.mode_of("g-n", "n") is stop
    assert core.plan([offer("n")], []).lease == ()


def test_a_stop_policy_gives_back_or_keeps_what_is_lent() -> None:
    book = LeaseTable(2.0)
    book.reserve("g-n", 1)
    book.grant("job", "g-n", 0.0)
    for said, renewed in (("None", 1), ("Hold", 1), ("HoldAndDrain", 0)):
        core = gate({"stopPolicy": said})
        judge(core, "n")
        plan = core.plan([offer("n")], book.leases())
        assert (len(plan.renew), len(plan.release)) == (renewed, 1 - renewed)


def test_advisory_says_what_it_would_do_and_does_nothing() -> None:
    core = gate({"mode": "Advisory"})
    [note] = judge(core, "n")
    verdict = core.verdict("n")
    assert (verdict.mode, verdict.would) == (OFF, ACTIVE)
    assert isinstance(note, CapacityNote)
    assert (note.event, note.fields["would"]) == ("capacity_advice", "active")
    assert core.plan([offer("n")], []).lease == ()


def test_lending_follows_the_hours_that_policies_allow_and_count_in() -> None:
    evening = {"from": "22:00", "to": "23:00", "timeZone": "UTC"}
    night = evening | {"from": "23:00", "to": "06:00"}
    core = gate(
        {"allowedWindows": [evening, night], "mode": "Active"},
        {"maxHarvest": {"compute": 0.2}, "during": [evening]},
        {"mode": "Off", "until": "2023-11-14T22:00:00Z"},
    )
    judge(core, "n", wall_s=None)
    assert core.verdict("n").mode is OFF, "an unknown time holds every policy"
    judge(core, "n")
    assert (core.verdict("n").mode, core.verdict("n").policy.compute) == (ACTIVE, 0.2)
    judge(core, "n", wall_s=NOON_S + 3_600)
    assert (core.verdict("n").mode, core.verdict("n").policy.compute) == (ACTIVE, None)
    judge(core, "n", wall_s=NOON_S + 12 * 3_600)
    assert core.verdict("n").mode is DRAIN
    assert said(core, "n") == [
        "outside allowedWindows daily 22:00-23:00 UTC; daily 23:00-06:00 UTC (p0)"
    ]


def test_guests_of_a_policy_are_counted_over_all_jobs() -> None:
    core = gate({"maxHarvest": {"guests": 2}, "nodeSelector": {"names": ["n*"]}})
    judge(core, "n0", "n1", "n2", "other")
    held = [("j", "n0"), ("k", "other")]
    assert core.admits("j", offer("n1"), held)
    assert not core.admits("j", offer("n2"), [*held, ("k", "n1")])
    assert core.admits("j", offer("other"), [*held, ("k", "n1")])


def test_in_a_blackout_what_is_lent_is_given_back() -> None:
    window = {"from": "22:00", "to": "23:00", "timeZone": "UTC"}
    core = gate({"blackoutWindows": [window]})
    judge(core, "n", wall_s=None)
    assert core.verdict("n").mode is DRAIN, "nobody knows what time it is"
    judge(core, "n", wall_s=NOON_S)
    assert core.verdict("n").mode is DRAIN
    assert "blackout daily 22:00-23:00 UTC (p0)" in said(core, "n")
    judge(core, "n", wall_s=NOON_S + 3_600)
    assert core.verdict("n").mode is ACTIVE


def test_a_cap_on_nodes_is_kept_and_who_lends_stays() -> None:
    nodes = [f"n{i}" for i in range(8)]
    core = gate({"maxHarvest": {"nodes": "25%"}})
    judge_settled(core, *nodes)
    lending = {node for node, mode in modes(core).items() if mode is ACTIVE}
    assert len(lending) == 2
    assert {m for n, m in modes(core).items() if n not in lending} == {OFF}
    judge_settled(core, *nodes, "a", "b", "c", "d")
    assert lending < {node for node, mode in modes(core).items() if mode is ACTIVE}
    core.apply(policy_of({"name": "p0", "mode": "Active", "maxHarvest": {"nodes": 1}}))
    judge_settled(core, *nodes)
    assert sum(mode is ACTIVE for mode in modes(core).values()) == 1


def test_only_so_many_hosts_of_a_deployment_lend() -> None:
    def host(name: str, deployment: str) -> NodeFacts:
        return NodeFacts(name, {"rose.dev/deployment": deployment})

    core = gate({"maxHarvest": {"deploymentShare": 0.5}})
    judge_settled(core, *(host(f"c{i}", "chat") for i in range(4)), host("solo", "code"))
    lending = [node for node, mode in modes(core).items() if mode is ACTIVE]
    assert len(lending) == 2
    assert "solo" not in lending, "half of one host is none"
    assert "0 of 1 hosts (p0)" in said(core, "solo")[0]


def test_after_a_start_a_node_that_seems_beyond_a_cap_keeps_what_it_lends() -> None:
    core = gate({"maxHarvest": {"nodes": "50%"}})
    assert core.greet(NodeFacts("n0"), 0.0) == []
    assert (core.verdict("n0").mode, core.verdict("n0").settled) == (HOLD, False)
    judge(core, "n0")
    assert (core.verdict("n0").mode, core.verdict("n0").settled) == (HOLD, False)
    judge(core, "n0", "n1", now_s=1.0)
    assert sorted(modes(core).values()) == [ACTIVE, HOLD]
    judge(core, "n0", "n1", now_s=SETTLE_S)
    assert sorted(modes(core).values()) == [ACTIVE, OFF]


def test_a_canary_acts_on_its_nodes_alone() -> None:
    nodes = [f"n{i}" for i in range(40)]
    core = gate({"canary": {"percent": 25}})
    judge(core, *nodes)
    assert {n for n, m in modes(core).items() if m is ACTIVE} == {
        n for n in nodes if in_canary(n, 25)
    }
    outside = next(n for n in nodes if not in_canary(n, 25))
    assert core.verdict(outside).would is ACTIVE
    assert "outside the canary of 25% (p0)" in said(core, outside)


def burn(core: CapacityGate, node: str) -> float:
    now_s, bad = 0.0, 0
    core.heard(node, 0.1, 0, 0, now_s, lends=True)
    for _ in range(60):
        now_s, bad = now_s + 60.0, bad + 50
        core.heard(node, 0.1, bad, bad, now_s, lends=True)
    return now_s


def test_a_canary_halts_when_a_host_burns_its_budget_until_it_is_applied_anew() -> None:
    nodes = [f"n{i}" for i in range(40)]
    core = gate({"canary": {"percent": 25}})
    judge(core, *nodes)
    first = next(n for n in nodes if in_canary(n, 25))
    now_s = burn(core, first)
    acts = judge(core, *nodes, now_s=now_s)
    [halt] = [act for act in acts if isinstance(act, Halt)]
    assert halt.policy == "p0"
    assert first in halt.why
    assert set(modes(core).values()) == {OFF}
    again = CapacityGate(HarvestModes(ACTIVE), core.policies, {"p0": halt.why})
    judge(again, *nodes)
    assert set(modes(again).values()) == {OFF}, "also after a restart"
    core.apply(core.policies[0])
    judge(core, *nodes, now_s=now_s)
    assert ACTIVE in modes(core).values()


def test_a_host_that_burns_its_budget_gives_back_what_it_lends() -> None:
    core = gate({})
    judge(core, "n", "m")
    now_s = burn(core, "n")
    acts = judge(core, "n", "m", now_s=now_s)
    assert modes(core) == {"m": ACTIVE, "n": DRAIN}
    assert "capacity_held" in [act.event for act in acts if isinstance(act, CapacityNote)]


def test_counters_of_a_new_daemon_begin_anew() -> None:
    core = judged({})
    core.heard("n", None, 1_000, 900, 0.0, lends=True)
    core.heard("n", None, 10, 0, 60.0, lends=True)
    judge(core, "n", now_s=61.0)
    assert core.verdict("n").mode is ACTIVE, "what was before it was heard first counts for nothing"


def test_a_host_that_begins_anew_is_counted_from_its_beginning() -> None:
    core = gate({})
    for minute, counts in enumerate([(1_000, 900), (10, 0), (20, 0)]):
        core.heard("n", 0.1, *counts, 60.0 * minute, lends=True, hosts={"a": counts})
    judge(core, "n", now_s=181.0)
    assert core.verdict("n").mode is ACTIVE


def test_quotas_and_priorities_of_jobs_are_the_strictest() -> None:
    tenants: Iterable[dict[str, object]] = [{"job": "grpo", "priority": 2.0, "maxGuests": 1}]
    core = gate({"tenants": tenants}, {"tenants": [{"job": "grpo", "priority": 0.5}]})
    judge(core, "n", "m")
    assert core.weight_of("grpo") == 0.5
    assert core.weight_of("other") == 1.0
    assert core.admits("grpo", offer("m"), [("other", "n")])
    assert not core.admits("grpo", offer("m"), [("grpo", "n")])
    assert core.admits("grpo", offer("m", ReplicaKind.DEDICATED), [("grpo", "n")])


def test_a_policy_that_is_deleted_no_longer_holds() -> None:
    core = judged({}, {"stopPolicy": "HoldAndDrain"})
    assert core.verdict("n").mode is DRAIN
    assert core.delete("p1")
    judge(core, "n")
    assert core.verdict("n").mode is ACTIVE
    assert core.delete("p0")
    judge(core, "n")
    assert core.verdict("n").mode is OFF, "without any policy nothing is lent"
    assert not core.delete("p0")


def test_a_host_that_is_watched_through_metrics_alone_is_advised_on_and_never_lends() -> None:
    core = gate({})
    core.watched("n", scraped=True)
    judge(core, "n")
    assert (core.verdict("n").mode, core.verdict("n").would) == (OFF, ACTIVE)
    assert "start the host with the plugin" in said(core, "n")[0]
    core.watched("n", scraped=False)
    judge(core, "n")
    assert core.verdict("n").mode is ACTIVE


@pytest.mark.parametrize(
    ("policy", "node", "kinds"),
    [
        ({"mode": "Off"}, "n", ["off"]),
        ({"mode": "Advisory"}, "n", ["advisory"]),
        ({"canary": {"percent": 0}}, "n", ["canary"]),
        (
            {"blackoutWindows": [{"from": "22:00", "to": "23:00", "timeZone": "UTC"}]},
            "n",
            ["blackout"],
        ),
        ({"stopPolicy": "Hold"}, "n", ["stop_policy"]),
        ({"maxHarvest": {"deploymentShare": 0.5}}, "n", ["cap"]),
        ({"maxHarvest": {"compute": 0.5}}, NodeFacts("n", takes_caps=False), ["old_node"]),
    ],
)
def test_each_limit_of_a_verdict_has_its_kind(
    policy: dict[str, object], node: str | NodeFacts, kinds: list[str]
) -> None:
    core = gate(policy)
    judge_settled(core, node)
    assert [limit.kind.value for limit in core.verdict("n").limits] == kinds


def test_a_busy_host_and_a_spent_budget_are_limits_of_two_kinds() -> None:
    core = gate({})
    judge(core, "n", "m")
    for minute in range(61):
        core.heard("n", 0.99, 0, 0, 60.0 * minute, lends=True)
        core.heard("m", 0.1, 80 * minute, 20 * minute, 60.0 * minute, lends=True)
        judge(core, "n", "m", now_s=60.0 * minute)
    assert [limit.kind for limit in core.verdict("n").limits] == [LimitKind.BUSY]
    assert [limit.kind for limit in core.verdict("m").limits] == [LimitKind.SLO_BUDGET]


def test_the_kinds_of_other_limits() -> None:
    core = gate({"maxHarvest": {"nodes": 1}, "canary": {"percent": 100}})
    core.greet(NodeFacts("n"), 0.0)
    assert [limit.kind for limit in core.verdict("n").limits] == [LimitKind.SETTLING]
    core.watched("n", scraped=True)
    judge_settled(core, "n")
    assert core.verdict("n").limits[0].kind is LimitKind.SCRAPED
    halted = CapacityGate(
        HarvestModes(ACTIVE), [policy_of({"name": "p", "mode": "Active"})], {"p": "x"}
    )
    judge(halted, "n")
    assert [limit.kind for limit in halted.verdict("n").limits] == [LimitKind.CANARY_HALTED]


# ---- holds ----


LIMIT = SloBudget()
MINUTE_S = 60.0


def serve(
    hold: BudgetHold, node: str, minutes: int, bad: int, since_s: float = 0.0, lends: bool = True
) -> float:
    """A hundred requests a minute; returns the time after them."""
    now_s = since_s
    for _ in range(minutes):
        hold.serve(node, 100 - bad, bad, now_s, lends=lends)
        now_s += MINUTE_S
    return now_s


def test_a_host_that_burns_its_budget_while_it_lends_is_held_with_its_numbers() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=20)
    [act] = hold.judge({"n": LIMIT}, now_s)
    assert act.begins
    assert act.node == "n"
    assert "burn rate 20.0" in act.why
    assert "at most 14.4" in act.why
    assert hold.status() == {"n": act.why}
    assert hold.judge({"n": LIMIT}, now_s) == [], "said once"


def test_a_budget_is_kept_over_restarts_and_says_how_much_data_it_has() -> None:
    hold, now_s, wall_s = BudgetHold(), 50.0, 1_800_000_000.0
    hold.restore({}, now_s, wall_s)
    hold.judge({"n": LIMIT}, now_s, {"n": "chat"})
    now_s = serve(hold, "n", minutes=10, bad=1, since_s=now_s)
    hold.judge({"n": LIMIT}, now_s, {"n": "chat"})
    left = hold.left(now_s)["chat"]
    assert (left.requests, left.history_s) == (1_000, 600.0)
    assert left.share == pytest.approx(0.0, abs=1e-9)
    wall_s += 600.0
    for day in range(1, 32):
        wall_s += DAY_S
        later, later_s = BudgetHold(), 7.0 * day
        later.restore(hold.saved(now_s), later_s, wall_s)
        later.restore({"chat": ((wall_s + 9.0, 5, 5),)}, later_s, wall_s)  # its clock was wrong
        later.serve("n", 0, 0, later_s, lends=False)
        later.judge({"n": LIMIT}, later_s, {"n": "chat"})
        left = later.left(later_s)["chat"]
        assert left.requests == (1_000 if day < 30 else 0)
        assert left.history_s == pytest.approx(day * DAY_S + 600.0) or day > 29
        hold, now_s = later, later_s
    assert hold.saved(now_s) == {}


def serve_both(hold: BudgetHold, minutes: int, bad: int, since_s: float = 0.0) -> float:
    """A node of two hosts: one with few requests, some of them bad, and one with many good ones."""
    now_s = since_s
    for _ in range(minutes):
        hosts = {"small": (100 - bad, bad), "large": (5_000, 0)}
        hold.serve("n", 5_100 - bad, bad, now_s, lends=True, hosts=hosts)
        now_s += MINUTE_S
    return now_s


def test_one_burning_host_of_several_holds_the_node_though_their_sum_would_not() -> None:
    hold, alone = BudgetHold(), BudgetHold()
    now_s = serve_both(hold, minutes=60, bad=20)
    [act] = hold.judge({"n": LIMIT}, now_s)
    assert act.begins
    assert act.why.startswith("SLO budget of host small: 1180 of 5900 requests")
    for minute in range(60):
        alone.serve("n", 5_080, 20, minute * MINUTE_S, lends=True)
    assert alone.judge({"n": LIMIT}, now_s) == []
    assert hold.left(now_s) == alone.left(now_s), "what is left is of all of them"
    now_s = serve_both(hold, minutes=7, bad=0, since_s=now_s)
    assert hold.judge({"n": LIMIT}, now_s) == [], "calm began just now"
    now_s = serve_both(hold, minutes=11, bad=0, since_s=now_s)
    [freed] = hold.judge({"n": LIMIT}, now_s)
    assert not freed.begins


def test_hosts_that_left_are_forgotten_and_ever_new_names_are_bounded() -> None:
    hold = BudgetHold()
    for at in range(500):
        hold.serve("n", 100, 0, at, lends=True, hosts={f"pod-{at}": (100, 0), "stays": (0, 0)})
    kept = hold._hosts["n"].hosts
    assert len(kept) <= MOST_HOSTS
    assert {"stays", "pod-499"} <= kept.keys()
    hold.serve("n", 1, 0, 500 + LONGEST_S, lends=True)
    assert not kept, "a node with one host again has no others"


@pytest.mark.parametrize(("bad", "lends"), [(3, True), (50, False)], ids=["slow leak", "own load"])
def test_a_slow_leak_and_misses_without_lending_hold_nobody(bad: int, lends: bool) -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=bad, lends=lends)
    assert hold.judge({"n": LIMIT}, now_s) == []


def test_one_miss_in_a_quiet_hour_is_not_enough() -> None:
    hold = BudgetHold()
    hold.serve("n", 1, 3, 0.0, lends=True)
    assert hold.judge({"n": LIMIT}, 1.0) == []
    assert len(hold.judge({"n": LIMIT.model_copy(update={"min_bad": 3})}, 1.0)) == 1


def test_a_hold_ends_only_after_a_calm_time() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=20)
    hold.judge({"n": LIMIT}, now_s)
    now_s = serve(hold, "n", minutes=7, bad=0, since_s=now_s, lends=False)
    assert hold.judge({"n": LIMIT}, now_s) == [], "calm began just now"
    now_s = serve(hold, "n", minutes=3, bad=40, since_s=now_s, lends=False)
    assert hold.judge({"n": LIMIT}, now_s) == [], "and is over"
    now_s = serve(hold, "n", minutes=7, bad=0, since_s=now_s, lends=False)
    assert hold.judge({"n": LIMIT}, now_s) == []
    now_s = serve(hold, "n", minutes=5, bad=0, since_s=now_s, lends=False)
    [act] = hold.judge({"n": LIMIT}, now_s)
    assert not act.begins
    assert hold.status() == {}


def test_several_burning_hosts_hold_their_deployment() -> None:
    hold = BudgetHold()
    nodes = [f"n{i}" for i in range(6)]
    deployments = dict.fromkeys(nodes, "chat") | {"other": "code"}
    limits = dict.fromkeys(deployments, LIMIT)
    now_s = 0.0
    for node in nodes:
        now_s = serve(hold, node, minutes=60, bad=20 if node == "n0" else 0)
    assert [act.node for act in hold.judge(limits, now_s, deployments)] == ["n0"]
    assert set(hold.status()) == {"n0"}
    for _ in range(30):
        now_s = serve(hold, "n1", minutes=1, bad=90, since_s=now_s)
    acts = hold.judge(limits, now_s, deployments)
    assert [act.deployment for act in acts if act.deployment] == ["chat"]
    assert "2 of 6 hosts" in acts[-1].why
    assert set(hold.status()) == set(nodes)


def test_a_node_cannot_shake_off_its_hold_by_leaving() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=20)
    hold.judge({"n": LIMIT}, now_s)
    hold.forget("n")
    assert "n" in hold.status()


def test_without_a_bound_nobody_is_held() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=20)
    assert hold.judge({"n": None}, now_s) == []
    hold.judge({"n": LIMIT}, now_s)
    [act] = hold.judge({"n": None}, now_s)
    assert not act.begins


BUSY = MaxHostBusy()


def see(hold: BusyHold, share: float, seconds: int, since_s: float) -> float:
    for _ in range(seconds * 2):
        hold.seen("n", share, since_s)
        since_s += 0.5
    return since_s


def test_a_busy_host_is_held_and_lends_again_below_the_lower_share() -> None:
    hold = BusyHold()
    now_s = see(hold, 0.9, 5, 0.0)
    assert hold.judge({"n": BUSY}, now_s) == [], "half a window says nothing"
    now_s = see(hold, 0.9, 6, now_s)
    [act] = hold.judge({"n": BUSY}, now_s)
    assert act.begins
    assert "90% of the last 10 s" in act.why
    now_s = see(hold, 0.8, 12, now_s)
    assert hold.judge({"n": BUSY}, now_s) == [], "between the two nothing changes"
    now_s = see(hold, 0.5, 12, now_s)
    [act] = hold.judge({"n": BUSY}, now_s)
    assert not act.begins


@pytest.mark.parametrize(
    ("shares", "silence_s"),
    [(((0.3, 12), (1.0, 3)), 0.0), (((0.9, 12),), 8.0)],
    ids=["burst", "old news"],
)
def test_a_burst_and_old_news_hold_nobody(
    shares: tuple[tuple[float, int], ...], silence_s: float
) -> None:
    hold, now_s = BusyHold(), 0.0
    for share, seconds in shares:
        now_s = see(hold, share, seconds, now_s)
    assert hold.judge({"n": BUSY}, now_s + silence_s) == []


# ---- advice ----


GIB = 1 << 30


@pytest.mark.parametrize(
    ("policy", "guest_bytes", "busy", "found"),
    [
        (EffectivePolicy(), 4 * GIB, 0.25, Lendable(4 * GIB, 0.75)),
        (EffectivePolicy(memory_bytes=GIB, compute=0.5), 4 * GIB, 0.25, Lendable(GIB, 0.5)),
        (EffectivePolicy(memory_bytes=GIB, compute=0.5), GIB // 2, 0.75, Lendable(GIB // 2, 0.25)),
        (EffectivePolicy(), None, None, Lendable(None, None)),
    ],
    ids=["uncapped", "capped", "below its caps", "nobody says"],
)
def test_a_node_would_lend_what_it_has_within_its_caps(
    policy: EffectivePolicy, guest_bytes: int | None, busy: float | None, found: Lendable
) -> None:
    assert lendable(ACTIVE, policy, guest_bytes, busy) == found


@pytest.mark.parametrize("would", [mode for mode in HarvestMode if mode is not ACTIVE])
def test_a_node_that_would_be_held_back_would_lend_nothing(would: HarvestMode) -> None:
    assert lendable(would, EffectivePolicy(), GIB, 0.0) == Lendable(0, 0.0)


def test_what_held_between_judgements_is_summed_up() -> None:
    book = AdviceBook()
    book.heard("n", GIB)

    def judge(would: HarvestMode, busy: float, now_s: float) -> None:
        book.judged([("n", would, EffectivePolicy())], lambda node: busy, now_s)

    judge(ACTIVE, 0.5, 10.0)
    judge(HarvestMode.HOLD_AND_DRAIN, 0.9, 14.0)
    judge(ACTIVE, 0.0, 15.0)
    advice = book.of("n")
    assert (advice.over_s, advice.byte_s, advice.compute_s) == (5.0, 4.0 * GIB, 2.0)
    assert advice.now == Lendable(GIB, 1.0)
    judge(ACTIVE, 0.0, 1_000.0)
    assert book.of("n").over_s == 5.0 + MOST_STEP_S, "while nobody judged nobody knows"


def test_a_node_that_is_lost_begins_anew() -> None:
    book = AdviceBook()
    book.heard("n", GIB)
    book.judged([("n", ACTIVE, EffectivePolicy())], lambda node: 0.5, 0.0)
    book.forget("n")
    assert book.of("n").now == Lendable(None, None)
