import numpy as np

from bench.common.checks import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    at_least,
    at_most,
    exactly_none,
    row_verdict,
)
from bench.common.stats import metric, quantiles, rounded
from bench.coserve.player import PREEMPTIONS, TOKENS
from bench.coserve.records import StepTimes, starts_s, yields_s
from executor.step_log import ARRIVAL, STEP
from rose.compare.bootstrap import Estimate, paired_difference

MS = 1_000_000


def test_an_interval_decides_only_when_all_of_it_is_on_one_side() -> None:
    assert at_most("x", Estimate(1.0, (0.9, 1.04)), 1.05).verdict == HOLDS
    assert at_most("x", Estimate(1.0, (0.9, 1.10)), 1.05).verdict == INCONCLUSIVE
    assert at_most("x", Estimate(1.2, (1.1, 1.30)), 1.05).verdict == FAILS
    assert at_least("x", Estimate(0.9, (0.85, 0.95)), 0.8).verdict == HOLDS
    assert at_least("x", Estimate(0.8, (0.75, 0.95)), 0.8).verdict == INCONCLUSIVE
    assert at_least("x", Estimate(0.5, (0.45, 0.55)), 0.8).verdict == FAILS


def test_no_interval_and_nothing_looked_at_decide_nothing() -> None:
    assert at_most("x", Estimate(1.0, None), 1.05).verdict == INCONCLUSIVE
    assert at_least("x", None, 1.05).verdict == INCONCLUSIVE
    assert exactly_none("x", 0, 0).verdict == INCONCLUSIVE
    assert exactly_none("x", 0, 5).verdict == HOLDS
    assert exactly_none("x", 1, 5).verdict == FAILS
    assert row_verdict([]) == INCONCLUSIVE


def test_a_row_fails_by_its_decisive_checks_only() -> None:
    good = at_most("a", Estimate(1.0, (1.0, 1.0)), 1.05)
    beside = at_most("b", Estimate(2.0, (2.0, 2.0)), 1.05, decisive=False)
    assert row_verdict([good, beside]) == HOLDS
    assert row_verdict([good, at_most("c", Estimate(2.0, (2.0, 2.0)), 1.05)]) == FAILS


def test_a_paired_difference_is_free_of_what_both_arms_share() -> None:
    rng = np.random.default_rng(0)
    shared = [[float(x) for x in rng.normal(0, 10, 5)] for _ in range(20)]
    pairs = [[(x - 1.0, x) for x in window] for window in shared]
    found = paired_difference(pairs, 0)
    assert found.ci95 is not None
    assert max(abs(end + 1.0) for end in found.ci95) < 1e-9


def test_quantiles_of_nothing_are_not_a_number() -> None:
    assert quantiles([1.0, 2.0, 4.0], 0.5, 0.75) == [2.0, 3.0]
    assert quantiles([], 0.5) == [None]
    assert rounded([0.0012345], 0.5, scale=1e3) == [1.234]
    assert np.isnan(rounded([], 0.5)).all()


def steps(*spans_ms: tuple[int, int], arrivals_ms: tuple[int, ...] = ()) -> StepTimes:
    rows = [(STEP, a * MS, b * MS, MS, 4, 2, 2) for a, b in spans_ms]
    rows += [(ARRIVAL, (a - 1) * MS, a * MS, 0, 9, 1, 0) for a in arrivals_ms]
    return StepTimes.of(np.array(rows, dtype=np.int64))


def test_busy_time_and_tokens_are_those_inside_the_span() -> None:
    times = steps((0, 10), (15, 25), (30, 40))
    assert times.busy_s((0.005, 0.032)) == 0.017
    assert times.sampled_in((0.005, 0.032)) == 4
    assert times.durations_s((0.005, 0.040)) == ([0.01, 0.01], [0.001, 0.001])


def test_an_arrival_waits_for_the_guest_step_it_finds_and_no_other() -> None:
    guest = steps((0, 10), (20, 28))
    host = steps((12, 15), (30, 33), arrivals_ms=(4, 11, 21, 27, 35))
    assert yields_s(guest, host.arrivals) == [0.006, 0.007, 0.001]
    assert starts_s(host, host.arrivals) == [0.008, 0.001, 0.009, 0.003]
    assert yields_s(steps(arrivals_ms=(1,)), host.arrivals) == []


def test_of_two_guest_steps_in_flight_the_second_is_waited_for_too() -> None:
    # Asynchronous scheduling: the second was given to the device while the first ran.
    guest = steps((0, 10), (10, 18), (18, 25), (40, 50))
    assert yields_s(guest, steps(arrivals_ms=(4, 12, 30, 44)).arrivals) == [0.014, 0.013, 0.006]


def test_counters_are_summed_over_their_samples() -> None:
    text = (
        "# HELP vllm:num_preemptions_total n\n"
        'vllm:num_preemptions_total{engine="0",model_name="host"} 2.0\n'
        'vllm:num_preemptions_total{engine="1",model_name="host"} 1.0\n'
        'vllm:generation_tokens_total{engine="0"} 1.5e+03\n'
    )
    assert metric(text, PREEMPTIONS) == 3
    assert metric(text, TOKENS) == 1_500
    assert metric(text, ["vllm:num_requests_running"]) == 0
