"""Jobs share what is leased: nobody starves, nothing lies idle, shares converge."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import (
    FairShares,
    Holding,
    JobDemand,
    Offer,
    ReplicaKind,
    Situation,
    make_policy,
)
from elastic_scheduler.policies.rose import RosePolicy


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
