import math

import numpy as np
import pytest

from rose.compare.bootstrap import (
    Floats,
    PairedWindow,
    estimate_of_sums,
    mean_difference,
    percentile,
    ratio_of_percentiles,
    ratio_of_rates,
)


def test_the_interval_of_a_mean_difference_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(100):
        before = [rng.normal(0, 1, 4).tolist() for _ in range(8)]
        after = [rng.normal(1, 1, 4).tolist() for _ in range(8)]
        low, high = mean_difference(before, after, seed).ci95 or (math.inf, -math.inf)
        covered += low <= 1 <= high
    assert covered >= 90


def test_samples_of_one_unit_do_not_count_as_independent() -> None:
    before = [[float(k % 2)] * 50 for k in range(10)]
    together = mean_difference(before, before, 0).ci95
    apart = mean_difference([[x] for u in before for x in u], [[x] for u in before for x in u], 0)
    assert together is not None
    assert apart.ci95 is not None
    assert together[1] - together[0] > 3 * (apart.ci95[1] - apart.ci95[0])


def test_the_same_seed_gives_the_same_interval() -> None:
    pairs = [(float(k), 2.0) for k in range(3, 9)]
    assert ratio_of_rates(pairs, pairs[::-1], 3) == ratio_of_rates(pairs, pairs[::-1], 3)


def test_a_ratio_of_rates_divides_totals_and_knows_its_noise() -> None:
    leased = [(150.0, 1.0), (148.0, 1.0), (152.0, 1.0), (301.0, 2.0), (149.0, 1.0)]
    frozen = [(100.0, 1.0), (101.0, 1.0), (99.0, 1.0), (200.0, 2.0), (100.0, 1.0)]
    found = ratio_of_rates(leased, frozen, 0)
    assert found.value == pytest.approx(1.5)
    assert found.ci95 is not None
    assert 1.4 < found.ci95[0] < 1.5 < found.ci95[1] < 1.6


def test_few_units_widen_the_interval_and_one_gives_none() -> None:
    pairs = [(110.0, 1.0), (130.0, 1.0)]
    frozen = [(100.0, 1.0), (100.0, 1.0)]
    assert ratio_of_rates(pairs, frozen, 0).ci95 == (pytest.approx(1.1), pytest.approx(1.3))
    assert ratio_of_rates(pairs[:1], frozen[:1], 0).ci95 is None


def test_identical_latencies_have_a_ratio_of_one_without_noise() -> None:
    windows = [PairedWindow([0.1 * k, 0.2], [0.1 * k, 0.2]) for k in range(1, 30)]
    found = ratio_of_percentiles(windows, 95, 0)
    assert found.value == 1.0
    assert found.ci95 == (1.0, 1.0)


def test_a_failed_request_counts_as_infinitely_late() -> None:
    windows = [PairedWindow([math.inf], [0.1])] * 20
    assert ratio_of_percentiles(windows, 50, 0).value == math.inf
    both = ratio_of_percentiles([PairedWindow([math.inf], [math.inf])] * 20, 50, 0)
    assert both.ci95 is None
    assert percentile([0.1, 0.2, math.inf], 50) == 0.2


def test_a_quotient_of_sums_weighs_each_group_and_lies_inside_its_interval() -> None:
    rng = np.random.default_rng(0)
    lent = [(60 * rng.uniform(0.9, 1.1), 1.0) for _ in range(10)]
    alone = [(100 * rng.uniform(0.9, 1.1), 1.0) for _ in range(5)]
    found = estimate_of_sums([lent, alone], lambda sums: _rate(sums[0]) / _rate(sums[1]), 0)
    assert found.value == pytest.approx(0.6, rel=0.05)
    assert found.ci95 is not None
    assert found.ci95[0] < found.value < found.ci95[1]
    assert found == estimate_of_sums([lent, alone], lambda sums: _rate(sums[0]) / _rate(sums[1]), 0)


def test_one_unit_of_a_group_gives_no_interval() -> None:
    found = estimate_of_sums([[(6.0, 1.0)] * 5, [(10.0, 1.0)]], lambda s: _rate(s[0]), 0)
    assert found.ci95 is None


def _rate(sums: Floats) -> Floats:
    result: Floats = sums[..., 0] / sums[..., 1]
    return result
