"""Leasing policies on a stand-in cluster, and fair shares of several jobs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import (
    FairShares,
    Holding,
    JobDemand,
    Offer,
    Policy,
    ReplicaKind,
    Situation,
    make_policy,
    policy_names,
)
from elastic_scheduler.policies.rose import AimdLimit, RosePolicy, SwitchCosts, saved_s, supply_of

TICK_S = 0.5
PLACES = 16
DEDICATED = 2


@dataclass(frozen=True, slots=True)
class Trace:
    """Guests are offered where `offered(guest, now_s)`; a lease needs `switch_s` to its tokens."""

    steps: int
    turns: int
    mean_tokens: int
    train_s: float
    guests: int
    switch_s: float
    offered: Callable[[int, float], bool]


@dataclass(slots=True)
class Outcome:
    """Result of a policy on a trace; guest seconds are the lent ones."""

    done_s: float = math.inf
    guest_s: float = 0.0
    takes: int = 0
    returns: int = 0
    revokes: int = 0
    changes_at_s: list[float] = field(default_factory=list)


def bursty(guest: int, now_s: float) -> bool:
    """Hosts are calm for 90 s and busy for 30 s, each shifted a little."""
    return (now_s + 7 * guest) % 120 < 90


def offer_of(name: str, kind: ReplicaKind) -> Offer:
    return Offer(name, kind, "http://h", "n", 0, 800.0, 8e3, 0, True, 5.0, 0, PLACES)


class StandinCluster:
    """One job, a few dedicated replicas, guests that come and go."""

    def __init__(self, policy: Policy, trace: Trace, seed: int = 0) -> None:
        self.policy, self.trace = policy, trace
        self.random = Random(seed)
        self.held: dict[str, Holding] = {}
        self.ready_s: dict[str, float] = {}
        self.left: list[float] = []
        self.step = 0
        self.idle_until_s = 0.0
        self.outcome = Outcome()
        self.offers = {
            f"own-{n}": offer_of(f"own-{n}", ReplicaKind.DEDICATED) for n in range(DEDICATED)
        }
        for n in range(trace.guests):
            self.offers[f"guest-{n}"] = offer_of(f"guest-{n}", ReplicaKind.GUEST)

    def run(self, limit_s: float = 20_000.0) -> Outcome:
        """Until all steps are done; `done_s` stays infinite when they never are."""
        now_s = 0.0
        while now_s < limit_s:
            now_s += TICK_S
            self.begin_step(now_s)
            self.take_back(now_s)
            self.lease(now_s)
            self.decode(now_s)
            if self.step >= self.trace.steps and not self.left:
                self.outcome.done_s = now_s
                break
        return self.outcome

    def begin_step(self, now_s: float) -> None:
        if self.left or now_s < self.idle_until_s or self.step >= self.trace.steps:
            return
        self.step += 1
        # A long tail: a few turns of a batch are several times as long as most.
        self.left = [
            self.trace.mean_tokens * min(8.0, 0.3 + self.random.paretovariate(1.5) / 2)
            for _ in range(self.trace.turns)
        ]

    def is_offered(self, name: str, now_s: float) -> bool:
        return name.startswith("own") or self.trace.offered(int(name.split("-")[1]), now_s)

    def take_back(self, now_s: float) -> None:
        for name, holding in list(self.held.items()):
            if not self.is_offered(name, now_s):
                guests = sum(each.startswith("guest") for each in self.held)
                del self.held[name]
                self.outcome.revokes += 1
                self.policy.revoked(holding, guests, now_s)

    def lease(self, now_s: float) -> None:
        free = tuple(
            each
            for name, each in self.offers.items()
            if name not in self.held and self.is_offered(name, now_s)
        )
        demand = JobDemand("job", len(self.left), sum(self.left), self.step)
        decision = self.policy.decide(Situation(now_s, free, tuple(self.held.values()), (demand,)))
        for move in decision.give_back:
            del self.held[move.replica]
            self.outcome.returns += 1
            self.outcome.changes_at_s.append(now_s)
        for move in decision.take:
            offer = self.offers[move.replica]
            self.held[move.replica] = Holding("job", offer, now_s)
            self.ready_s[move.replica] = now_s + self.trace.switch_s
            self.policy.switched(offer, self.trace.switch_s)
            if offer.kind is ReplicaKind.GUEST:
                self.outcome.takes += 1
                self.outcome.changes_at_s.append(now_s)

    def decode(self, now_s: float) -> None:
        """Longest first, a place each; a place decodes at its share of the replica's rate."""
        ready = [name for name in self.held if self.ready_s[name] <= now_s]
        self.outcome.guest_s += TICK_S * sum(name.startswith("guest") for name in self.held)
        if not self.left:
            return
        rate_tok_s = 800.0 / PLACES
        self.left.sort(reverse=True)
        served = PLACES * len(ready)
        self.left = [
            left - rate_tok_s * TICK_S if place < served else left
            for place, left in enumerate(self.left)
        ]
        self.left = [left for left in self.left if left > 0]
        if not self.left:
            self.idle_until_s = now_s + self.trace.train_s


# ---- policies ----


BURSTY = Trace(
    steps=6, turns=256, mean_tokens=1500, train_s=30.0, guests=6, switch_s=8.0, offered=bursty
)


def guest(name: str = "g", **changes: object) -> Offer:
    fields: dict[str, object] = {"decode_tok_s": 100.0, "max_sequences": 8}
    fields.update(changes)
    return Offer(
        name,
        ReplicaKind.GUEST,
        "http://h",
        "n",
        0,
        fields["decode_tok_s"],  # type: ignore[arg-type]
        1e3,
        0,
        True,
        5.0,
        0,
        fields["max_sequences"],  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {name: StandinCluster(make_policy(name), BURSTY).run() for name in policy_names()}


def test_every_policy_gets_the_job_done(outcomes: dict[str, Outcome]) -> None:
    assert all(outcome.done_s < math.inf for outcome in outcomes.values())
    assert outcomes["fixed"].guest_s == 0


@pytest.mark.parametrize("other", ["fixed", "paper"])
def test_rose_is_not_worse_on_a_bursty_trace(outcomes: dict[str, Outcome], other: str) -> None:
    assert outcomes["rose"].done_s <= outcomes[other].done_s


def test_rose_borrows_no_more_than_what_takes_everything(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["rose"].guest_s <= outcomes["spot"].guest_s
    assert outcomes["rose"].done_s <= 1.1 * outcomes["spot"].done_s


@pytest.mark.parametrize("name", policy_names())
def test_a_trace_has_one_outcome(name: str, outcomes: dict[str, Outcome]) -> None:
    assert StandinCluster(make_policy(name), BURSTY).run() == outcomes[name]


def test_an_unknown_policy_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="fixed, spot, serverless, paper, rose"):
        make_policy("greedy")


@given(st.integers(1, 64), st.floats(1e2, 1e6), st.floats(0.1, 60.0))
def test_steady_demand_is_settled_once(turns: int, owed_tokens: float, switch_s: float) -> None:
    policy = make_policy("rose")
    offers = tuple(guest(f"g{number}") for number in range(5))
    for each in offers:
        policy.switched(each, switch_s)
    held: dict[str, Holding] = {}
    changes_at: list[int] = []
    for tick in range(1_000):
        free = tuple(each for each in offers if each.replica not in held)
        jobs = (JobDemand("job", turns, owed_tokens),)
        decision = policy.decide(Situation(tick, free, tuple(held.values()), jobs))
        for move in decision.give_back:
            del held[move.replica]
        for move in decision.take:
            held[move.replica] = Holding("job", guest(move.replica), tick)
        changes_at += [tick] * (len(decision.take) + len(decision.give_back))
    assert held
    assert all(tick < 400 for tick in changes_at)
    assert len(changes_at) <= 2 * len(offers)


def test_a_load_that_swings_does_not_swing_the_leases() -> None:
    policy = make_policy("rose")
    offers = tuple(guest(f"g{number}") for number in range(4))
    held: dict[str, Holding] = {}
    changes = 0
    for tick in range(600):
        # Work for ten seconds, none for ten: shorter than anything is given back for.
        jobs = (JobDemand("job", 64.0, 1e5 if tick % 20 < 10 else math.nan),)
        free = tuple(each for each in offers if each.replica not in held)
        decision = policy.decide(Situation(tick, free, tuple(held.values()), jobs))
        changes += len(decision.take) + len(decision.give_back)
        for move in decision.give_back:
            del held[move.replica]
        for move in decision.take:
            held[move.replica] = Holding("job", guest(move.replica), tick)
    assert changes == len(offers)


def test_a_slow_swing_is_followed_a_few_times_and_then_sat_out() -> None:
    policy = make_policy("rose")
    held: tuple[Holding, ...] = ()
    taken_at: list[int] = []
    for tick in range(4_000):
        jobs = (JobDemand("job", 8.0, 1e5 if tick % 60 < 30 else 0.0),)
        decision = policy.decide(Situation(tick, () if held else (guest(),), held, jobs))
        if decision.give_back:
            held = ()
        if decision.take:
            held = (Holding("job", guest(), tick),)
            taken_at.append(tick)
    assert 1 < len(taken_at) <= 4
    assert taken_at[-1] < 400


def test_no_traffic_does_not_freeze_the_controller() -> None:
    policy = make_policy("rose")
    held: tuple[Holding, ...] = (Holding("job", guest(), 0.0),)
    idle = (JobDemand("job", math.nan, math.nan),)
    back = [policy.decide(Situation(t, (), held, idle)).give_back for t in range(40)]
    assert sum(map(len, back[:15])) == 0
    assert any(back)
    work = (JobDemand("job", 8.0, 1e6),)
    assert policy.decide(Situation(200.0, (guest(),), (), work)).take


def test_a_replica_is_taken_when_it_saves_more_than_its_switch_costs() -> None:
    for switch_s, is_taken in ((4.0, True), (6.0, False)):
        policy = make_policy("rose")
        policy.switched(guest(), switch_s)
        held = (Holding("job", guest("other"), 0.0),)
        # 1,000 tokens at 100/s: ten seconds, five with the second replica.
        jobs = (JobDemand("job", 16.0, 1_000.0),)
        decision = policy.decide(Situation(0.0, (guest(),), held, jobs))
        assert bool(decision.take) is is_taken
    assert saved_s(JobDemand("j", 16.0, 1_000.0), supply_of([guest("a")]), guest("b")) == 5.0
    # Fewer turns than places: each is faster where fewer share a step, but not twice as fast.
    assert 0.0 < saved_s(JobDemand("j", 4.0, 1_000.0), supply_of([guest("a")]), guest("b")) < 5.0
    # The long tail: no more turns than replicas, so another one helps none of them.
    assert saved_s(JobDemand("j", 1.0, 1_000.0), supply_of([guest("a")]), guest("b")) == 0.0


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True))
def test_no_figure_of_a_meter_breaks_the_measure(turns: float, owed_tokens: float) -> None:
    demand = JobDemand("j", turns, owed_tokens).cleaned()
    assert saved_s(demand, supply_of([guest("a")]), guest("b"), tenure_s=60.0) >= 0.0
    costs = SwitchCosts()
    costs.observe(guest(), owed_tokens)
    assert costs.expected_s(guest()) >= 0.0


def test_the_allowance_halves_once_an_event_and_grows_by_one() -> None:
    allowance = AimdLimit(grow_s=5.0, event_s=5.0)
    assert allowance.limit(0.0) == math.inf
    for now_s in (10.0, 11.0, 12.0):
        allowance.revoked(8, now_s)
    assert allowance.limit(12.0) == 4.0
    assert allowance.limit(20.0) == 6.0
    allowance.revoked(1, 30.0)
    assert allowance.limit(30.0) == 1.0


def test_paper_grows_again_with_the_next_step_only() -> None:
    policy = make_policy("paper")
    jobs = (JobDemand("job", step=3),)
    assert policy.decide(Situation(0.0, (guest("a"), guest("b")), (), jobs)).take
    policy.revoked(Holding("job", guest("a"), 0.0), 2, 1.0)
    assert not policy.decide(Situation(2.0, (guest("a"),), (), jobs)).take
    assert policy.decide(Situation(3.0, (guest("a"),), (), (JobDemand("job", step=4),))).take


def test_serverless_follows_concurrency_down_only_after_its_window() -> None:
    policy = make_policy("serverless")
    free = tuple(guest(f"g{number}") for number in range(5))
    take = policy.decide(Situation(0.0, free, (), (JobDemand("job", 16.0, 1e3),))).take
    assert len(take) == 3
    held = tuple(Holding("job", guest(move.replica), 0.0) for move in take)
    idle = (JobDemand("job", 0.0, 0.0),)
    assert policy.decide(Situation(30.0, (), held, idle)).give_back == ()
    assert len(policy.decide(Situation(61.0, (), held, idle)).give_back) == 3


# ---- fair shares ----


def offer(name: str, decode_tok_s: float = 100.0, kv_tokens: int = 1000) -> Offer:
    return Offer(
        name, ReplicaKind.GUEST, "http://h", "n", kv_tokens, decode_tok_s, 1e3, 0, True, 9, 0, 8
    )


def play(
    policy: RosePolicy, jobs: list[JobDemand], offers: list[Offer], until_s: float
) -> tuple[dict[str, float], list[Holding]]:
    """Replica-seconds of each job, and what is held at the end; leases end when asked to."""
    held: dict[str, Holding] = {}
    had_s = dict.fromkeys((job.job for job in jobs), 0.0)
    for tick in range(int(until_s)):
        free = tuple(each for each in offers if each.replica not in held)
        decision = policy.decide(Situation(tick, free, tuple(held.values()), tuple(jobs)))
        for move in decision.give_back:
            assert held.pop(move.replica).job == move.job
        for move in decision.take:
            [taken] = [each for each in free if each.replica == move.replica]
            held[move.replica] = Holding(move.job, taken, tick)
        # Work conserving: what was free a second ago, or was just given back, is held now.
        given = {move.replica for move in decision.give_back}
        assert {each.replica for each in offers} - set(held) <= given
        for each in held.values():
            had_s[each.job] += 1.0
    return had_s, list(held.values())


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4),
    st.lists(st.sampled_from([50.0, 100.0, 200.0]), min_size=1, max_size=6),
)
def test_no_job_starves_and_no_replica_is_left_idle(
    weights: list[float], rates: list[float]
) -> None:
    jobs = [JobDemand(f"j{n}", weight=weight) for n, weight in enumerate(weights)]
    offers = [offer(f"r{n}", rate) for n, rate in enumerate(rates)]
    had_s, held = play(RosePolicy(hold_s=10.0), jobs, offers, 400.0)
    assert len(held) >= len(offers) - 1
    assert all(seconds > 0 for seconds in had_s.values())


@pytest.mark.parametrize(("jobs", "replicas"), [(3, 1), (3, 2), (2, 3), (4, 4)])
def test_equal_jobs_get_equal_service_over_time(jobs: int, replicas: int) -> None:
    demands = [JobDemand(f"j{number}") for number in range(jobs)]
    offers = [offer(f"r{number}") for number in range(replicas)]
    had_s, _ = play(RosePolicy(hold_s=10.0), demands, offers, 3_000.0)
    assert max(had_s.values()) - min(had_s.values()) < 0.1 * sum(had_s.values()) / jobs


def test_weights_decide_how_much() -> None:
    jobs = [JobDemand("heavy", weight=3.0), JobDemand("light")]
    offers = [offer(f"r{number}") for number in range(8)]
    _, held = play(RosePolicy(hold_s=10.0), jobs, offers, 200.0)
    assert sum(each.job == "heavy" for each in held) == 6


def test_a_newcomer_gets_its_share_after_the_hold_time() -> None:
    policy = RosePolicy(hold_s=10.0)
    offers = [offer(f"r{number}") for number in range(4)]
    held: dict[str, Holding] = {}
    for tick in range(80):
        jobs = (JobDemand("first"), *((JobDemand("second"),) if tick >= 20 else ()))
        free = tuple(each for each in offers if each.replica not in held)
        decision = policy.decide(Situation(tick, free, tuple(held.values()), jobs))
        for move in decision.give_back:
            del held[move.replica]
        for move in decision.take:
            taken = next(each for each in free if each.replica == move.replica)
            held[move.replica] = Holding(move.job, taken, tick)
    assert sorted(each.job for each in held.values()) == ["first"] * 2 + ["second"] * 2


def test_a_job_without_work_gains_no_credit() -> None:
    fair = FairShares(hold_s=10.0)
    held = (Holding("busy", offer("r"), 0.0),)
    for tick in range(100):
        fair.account([JobDemand("busy"), JobDemand("idle", turns=0.0)], held, tick)
    both = [JobDemand("busy"), JobDemand("idle")]
    assert fair.move(both, held, 100.0) is None
    for tick in range(100, 112):
        fair.account(both, held, tick)
    assert fair.move(both, held, 112.0) == "r"


def test_demand_that_is_not_a_number_is_no_demand() -> None:
    policy = make_policy("rose")
    jobs = (JobDemand("j", math.nan, math.nan),)
    assert policy.decide(Situation(0.0, (offer("r"),), (), jobs)).take == ()
    busy = (JobDemand("j", 8.0, 1e6),)
    assert [m.replica for m in policy.decide(Situation(1.0, (offer("r"),), (), busy)).take] == ["r"]
