"""Holds of hosts that burn their SLO budget while they lend, or that are busy."""

from elastic_scheduler.capacity.budget_hold import (
    LONGEST_S,
    MOST_HOSTS,
    BudgetHold,
    BusyHold,
    BusySeen,
    Gone,
    HoldBegun,
    HoldEnded,
    JudgeBudgets,
    JudgeBusy,
    Served,
)
from elastic_scheduler.capacity.policy import MaxHostBusy, SloBudget

LIMIT = SloBudget()
MINUTE_S = 60.0


def serve(
    hold: BudgetHold, node: str, minutes: int, bad: int, since_s: float = 0.0, lends: bool = True
) -> float:
    """A hundred requests a minute; returns the time after them."""
    now_s = since_s
    for _ in range(minutes):
        hold.step(Served(node, 100 - bad, bad, lends), now_s)
        now_s += MINUTE_S
    return now_s


def test_a_host_that_burns_its_budget_while_it_lends_is_held_with_its_numbers() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=20)
    [act] = hold.step(JudgeBudgets({"n": LIMIT}), now_s)
    assert isinstance(act, HoldBegun)
    assert act.node == "n"
    assert "burn rate 20.0" in act.why
    assert "at most 14.4" in act.why
    assert hold.status() == {"n": act.why}
    assert hold.step(JudgeBudgets({"n": LIMIT}), now_s) == [], "said once"


def serve_both(hold: BudgetHold, minutes: int, bad: int, since_s: float = 0.0) -> float:
    """A node of two hosts: one with few requests, some of them bad, and one with many good ones."""
    now_s = since_s
    for _ in range(minutes):
        hosts = {"small": (100 - bad, bad), "large": (5_000, 0)}
        hold.step(Served("n", 5_100 - bad, bad, True, hosts), now_s)
        now_s += MINUTE_S
    return now_s


def test_one_burning_host_of_several_holds_the_node_though_their_sum_would_not() -> None:
    hold, alone = BudgetHold(), BudgetHold()
    now_s = serve_both(hold, minutes=60, bad=20)
    [act] = hold.step(JudgeBudgets({"n": LIMIT}), now_s)
    assert isinstance(act, HoldBegun)
    assert act.why.startswith("SLO budget of host small: 1180 of 5900 requests")
    for minute in range(60):
        alone.step(Served("n", 5_080, 20, True), minute * MINUTE_S)
    assert alone.step(JudgeBudgets({"n": LIMIT}), now_s) == []
    assert hold.left(now_s) == alone.left(now_s), "what is left is of all of them"
    now_s = serve_both(hold, minutes=7, bad=0, since_s=now_s)
    assert hold.step(JudgeBudgets({"n": LIMIT}), now_s) == [], "calm began just now"
    now_s = serve_both(hold, minutes=11, bad=0, since_s=now_s)
    [freed] = hold.step(JudgeBudgets({"n": LIMIT}), now_s)
    assert isinstance(freed, HoldEnded)


def test_hosts_that_left_are_forgotten_and_ever_new_names_are_bounded() -> None:
    hold = BudgetHold()
    for at in range(500):
        hold.step(Served("n", 100, 0, True, {f"pod-{at}": (100, 0), "stays": (0, 0)}), at)
    kept = hold._hosts["n"].hosts
    assert len(kept) <= MOST_HOSTS
    assert {"stays", "pod-499"} <= kept.keys()
    hold.step(Served("n", 1, 0, True), 500 + LONGEST_S)
    assert not kept, "a node with one host again has no others"


def test_a_slow_leak_holds_nobody() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=3)
    assert hold.step(JudgeBudgets({"n": LIMIT}), now_s) == []


def test_a_host_that_does_not_lend_burns_by_itself() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=50, lends=False)
    assert hold.step(JudgeBudgets({"n": LIMIT}), now_s) == []


def test_one_miss_in_a_quiet_hour_is_not_enough() -> None:
    hold = BudgetHold()
    hold.step(Served("n", 1, 3, True), 0.0)
    assert hold.step(JudgeBudgets({"n": LIMIT}), 1.0) == []
    assert len(hold.step(JudgeBudgets({"n": LIMIT.model_copy(update={"min_bad": 3})}), 1.0)) == 1


def test_a_hold_ends_only_after_a_calm_time() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=20)
    hold.step(JudgeBudgets({"n": LIMIT}), now_s)
    now_s = serve(hold, "n", minutes=7, bad=0, since_s=now_s, lends=False)
    assert hold.step(JudgeBudgets({"n": LIMIT}), now_s) == [], "calm began just now"
    now_s = serve(hold, "n", minutes=3, bad=40, since_s=now_s, lends=False)
    assert hold.step(JudgeBudgets({"n": LIMIT}), now_s) == [], "and is over"
    now_s = serve(hold, "n", minutes=7, bad=0, since_s=now_s, lends=False)
    assert hold.step(JudgeBudgets({"n": LIMIT}), now_s) == []
    now_s = serve(hold, "n", minutes=5, bad=0, since_s=now_s, lends=False)
    [act] = hold.step(JudgeBudgets({"n": LIMIT}), now_s)
    assert isinstance(act, HoldEnded)
    assert hold.status() == {}


def test_several_burning_hosts_hold_their_deployment() -> None:
    hold = BudgetHold()
    nodes = [f"n{i}" for i in range(6)]
    deployments = dict.fromkeys(nodes, "chat") | {"other": "code"}
    limits = dict.fromkeys(deployments, LIMIT)
    now_s = 0.0
    for node in nodes:
        now_s = serve(hold, node, minutes=60, bad=20 if node == "n0" else 0)
    assert [act.node for act in hold.step(JudgeBudgets(limits, deployments), now_s)] == ["n0"]
    assert set(hold.status()) == {"n0"}
    for _ in range(30):
        now_s = serve(hold, "n1", minutes=1, bad=90, since_s=now_s)
    acts = hold.step(JudgeBudgets(limits, deployments), now_s)
    assert [act.deployment for act in acts if act.deployment] == ["chat"]
    assert "2 of 6 hosts" in acts[-1].why
    assert set(hold.status()) == set(nodes)


def test_a_node_cannot_shake_off_its_hold_by_leaving() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=20)
    hold.step(JudgeBudgets({"n": LIMIT}), now_s)
    hold.step(Gone("n"), now_s)
    assert "n" in hold.status()


def test_without_a_bound_nobody_is_held() -> None:
    hold = BudgetHold()
    now_s = serve(hold, "n", minutes=60, bad=20)
    assert hold.step(JudgeBudgets({"n": None}), now_s) == []
    hold.step(JudgeBudgets({"n": LIMIT}), now_s)
    [act] = hold.step(JudgeBudgets({"n": None}), now_s)
    assert isinstance(act, HoldEnded)


BUSY = MaxHostBusy()


def see(hold: BusyHold, share: float, seconds: int, since_s: float) -> float:
    for _ in range(seconds * 2):
        hold.step(BusySeen("n", share), since_s)
        since_s += 0.5
    return since_s


def test_a_busy_host_is_held_and_lends_again_below_the_lower_share() -> None:
    hold = BusyHold()
    now_s = see(hold, 0.9, 5, 0.0)
    assert hold.step(JudgeBusy({"n": BUSY}), now_s) == [], "half a window says nothing"
    now_s = see(hold, 0.9, 6, now_s)
    [act] = hold.step(JudgeBusy({"n": BUSY}), now_s)
    assert isinstance(act, HoldBegun)
    assert "90% of the last 10 s" in act.why
    now_s = see(hold, 0.8, 12, now_s)
    assert hold.step(JudgeBusy({"n": BUSY}), now_s) == [], "between the two nothing changes"
    now_s = see(hold, 0.5, 12, now_s)
    [act] = hold.step(JudgeBusy({"n": BUSY}), now_s)
    assert isinstance(act, HoldEnded)


def test_a_burst_holds_nobody() -> None:
    hold = BusyHold()
    now_s = see(hold, 0.3, 12, 0.0)
    now_s = see(hold, 1.0, 3, now_s)
    assert hold.step(JudgeBusy({"n": BUSY}), now_s) == []


def test_a_host_that_says_nothing_any_more_is_not_judged_by_old_news() -> None:
    hold = BusyHold()
    now_s = see(hold, 0.9, 12, 0.0)
    assert hold.step(JudgeBusy({"n": BUSY}), now_s + 8.0) == []
