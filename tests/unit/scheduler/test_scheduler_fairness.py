"""Several jobs share the guests: by weight, within their quotas, and no flood starves another."""

import pytest
from leased_fleet import StandinFleet

from rose.scheduler.core.demand import JobFigures
from rose.scheduler.core.messages import JobRegistered

# More work than all replicas here have places for.
MUCH = 500


def busy(job: str, turns: int = MUCH) -> JobFigures:
    return JobFigures(job, turns, 1e3 * turns, 400.0)


@pytest.mark.parametrize("guests", [1, 3])
def test_two_equal_jobs_get_equal_guest_time_over_200_switches(guests: int) -> None:
    fleet = StandinFleet(guests, {"a": 1.0, "b": 1.0})
    fleet.play_until(200, lambda s: (busy("a"), busy("b")))
    a, b = fleet.served_s["a"], fleet.served_s["b"]
    assert abs(a - b) < 0.1 * (a + b) / 2


@pytest.mark.parametrize("guests", [1, 3])
def test_a_pause_between_rounds_costs_a_job_neither_its_turn_nor_its_debt(guests: int) -> None:
    """Trainers that stop asking while they train, each in a rhythm of its own."""
    fleet = StandinFleet(guests, {"a": 1.0, "b": 1.0})

    def rounds(_: float) -> tuple[JobFigures, ...]:
        now_s = fleet.bench.now_s
        return (busy("a", MUCH if now_s % 13 > 3 else 0), busy("b", MUCH if now_s % 17 > 3 else 0))

    fleet.play_until(100, rounds)
    a, b = fleet.served_s["a"], fleet.served_s["b"]
    assert abs(a - b) < 0.1 * (a + b) / 2


def test_five_jobs_share_by_their_weights() -> None:
    weights = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 0.5, "e": 0.5}
    fleet = StandinFleet(8, weights)
    fleet.play(2_000.0, lambda s: tuple(map(busy, weights)))
    whole = sum(fleet.served_s.values())
    for job, weight in weights.items():
        assert fleet.served_s[job] / whole == pytest.approx(weight / 8, rel=0.1)


def test_a_job_that_floods_starves_no_other() -> None:
    fleet = StandinFleet(4, {"calm": 1.0, "flood": 1.0})
    fleet.play(100.0, lambda s: (busy("calm", 64),))
    fleet.play(600.0, lambda s: (busy("calm", 64), busy("flood", 100_000)))
    assert fleet.served_s["calm"] >= 0.5 * (sum(fleet.served_s.values()))


def test_a_job_of_more_weight_gets_guests_back_from_one_of_less() -> None:
    fleet = StandinFleet(4, {"low": 1.0, "high": 3.0})
    fleet.play(60.0, lambda s: (busy("low"),))
    assert fleet.served_s["high"] == 0
    fleet.play(300.0, lambda s: (busy("low"), busy("high")))
    [high, low] = fleet.bench.core.status(fleet.bench.now_s).jobs
    assert (high.job, high.guests, low.guests) == ("high", 3, 1)


def test_guests_stay_within_a_quota_also_one_that_is_lowered() -> None:
    fleet = StandinFleet(4, {"a": 1.0, "b": 1.0})
    fleet.bench.step(JobRegistered("a", 1, max_guests=1))
    fleet.play(60.0, lambda s: (busy("a"), busy("b")))
    [a, b] = fleet.bench.core.status(fleet.bench.now_s).jobs
    assert (a.guests, b.guests) == (1, 3)
    fleet.bench.step(JobRegistered("b", 1, max_guests=2))
    fleet.play(10.0, lambda s: (busy("a"), busy("b")))
    [a, b] = fleet.bench.core.status(fleet.bench.now_s).jobs
    assert (a.guests, b.guests) == (1, 2)


def test_a_job_gets_back_the_guest_that_holds_its_weights() -> None:
    fleet = StandinFleet(2, {"a": 1.0, "b": 1.0})
    fleet.play(30.0, lambda s: (busy("a"), busy("b")))
    held = {name: each.job for name, each in fleet.offers.items()}
    assert sorted(held.values()) == ["a", "b"]
    # Both rest, and both want a guest again.
    fleet.play(60.0, lambda s: ())
    assert not fleet.bench.core.status(fleet.bench.now_s).leases
    fleet.play(30.0, lambda s: (busy("a"), busy("b")))
    assert {name: each.job for name, each in fleet.offers.items()} == held
    assert fleet.switches == 0
