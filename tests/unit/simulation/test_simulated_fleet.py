"""A fleet's jobs borrow what deployments lend: never a host twice, never more than there is."""

import json
from dataclasses import replace
from functools import cache

from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.simulation.engine_specs import published_engine
from rose.simulation.fluid.fleet import Deployment, FleetJob, FleetResult, FleetSpec, run_fleet
from rose.simulation.setups import ALFWORLD_32B, thousand_cards
from rose.simulation.workloads.amounts import LogNormal
from rose.simulation.workloads.episodes import ALFWORLD
from rose.simulation.workloads.traffic import CONVERSATION_DAY, BurstyTraffic
from slo import SloSpec

TRAFFIC = BurstyTraffic(10.0, LogNormal(1_000, 0.5), LogNormal(60, 0.5), day=CONVERSATION_DAY)
SERVES = Deployment("chat", 8, published_engine("70b"), TRAFFIC, SloSpec("70b", 2.0, 0.2))
TRAINS = FleetJob(
    "train", "32b", 2, 2, 8, 16, replace(ALFWORLD_32B.trainer(), groups=4), ALFWORLD
)  # fmt: skip
FLEET = FleetSpec((SERVES,), (TRAINS, replace(TRAINS, name="other", start_s=900.0)), 3_600.0)


@cache
def borrowed() -> FleetResult:
    return run_fleet(FLEET)


def test_a_fleet_is_the_same_for_a_seed_and_borrowing_helps_its_jobs() -> None:
    alone, borrowing = run_fleet(FLEET, borrows=False), borrowed()
    assert borrowing == run_fleet(FLEET)
    assert json.loads(json.dumps(borrowing.plain(), allow_nan=False))["cards"] == 56
    assert alone.borrowed_gpu_hours == 0 < borrowing.borrowed_gpu_hours
    for before, after in zip(alone.jobs, borrowing.jobs, strict=True):
        assert after.tokens_per_s > before.tokens_per_s
    assert alone.gpu_use < borrowing.gpu_use <= 1


def test_no_more_is_borrowed_than_hosts_lend() -> None:
    for hour in borrowed().series:
        assert 0 <= hour.borrowed <= hour.lendable + 1e-9


def test_nothing_is_borrowed_where_the_operator_or_the_memory_says_no() -> None:
    shy = replace(SERVES, hold=MaxHostBusy(share=0.05, resume=0.04), slack_share=0.0)
    assert run_fleet(replace(FLEET, deployments=(shy,))).borrowed_gpu_hours == 0
    small = replace(SERVES, engine=published_engine("8b"))
    assert run_fleet(replace(FLEET, deployments=(small,))).borrowed_gpu_hours == 0


def test_a_night_lends_more_than_an_afternoon() -> None:
    idle_only = replace(SERVES, slack_share=0.0)
    night, afternoon = (idle_only.lendable(hour * 3_600.0) for hour in (3, 14))
    assert night[0] < afternoon[0]
    assert night[1] > afternoon[1]


def test_a_thousand_cards_are_a_thousand() -> None:
    assert thousand_cards(7.0).cards == 1_000
