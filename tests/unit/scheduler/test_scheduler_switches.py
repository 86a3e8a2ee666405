"""A gateway's measurement of a lease reaches the policy, once."""

import math

import pytest
from core_cases import CoreBench, offer

from elastic_scheduler import HarvestMode, Offer, SwitchKind, make_policy
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import JobFigures, Switched
from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.messages import Demanded, TakenBack
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import load
from rose.scheduler.wire import demanded

NONE = (JobFigures(""),)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    told: list[tuple[str, float]] = []

    def switched(self: object, each: Offer, took_s: float, switch: SwitchKind) -> None:
        told.append((each.replica, took_s))

    monkeypatch.setattr("elastic_scheduler.policies.baselines.SpotPolicy.switched", switched)
    return told


def bench_with(policy: str) -> CoreBench:
    bench = CoreBench()
    times = LeaseTimes(5.0, 1.0, 1.0)
    bench.core = SchedulerCore(load(()), HarvestMode.ACTIVE, times, make_policy(policy))
    bench.with_job()
    bench.attach()
    return bench


def test_a_lease_is_measured_once_and_only_the_one_that_lives(
    told: list[tuple[str, float]],
) -> None:
    bench = bench_with("spot")
    bench.offered(offer("g0"))
    for gateway, took_s in (("a", 2.5), ("a", 2.5), ("b", 40.0)):
        bench.step(Demanded(gateway, NONE, (Switched("g0", 1, took_s),)))
    assert told == [("g0", 2.5)]
    bench.step(Demanded("a", NONE, (Switched("g0", 7, 1.0), Switched("nobody", 1, 1.0))))
    bench.step(TakenBack(1, "g0", 1, "pressure"))
    bench.step(Demanded("a", NONE, (Switched("g0", 1, 9.0),)))
    assert told == [("g0", 2.5)]
    bench.now_s += 2.0
    bench.offered(offer("g0", epoch=1))
    bench.step(Demanded("a", NONE, (Switched("g0", 2, 3.5),)))
    assert told == [("g0", 2.5), ("g0", 3.5)]
    assert "first_token" in bench.records()


@pytest.mark.parametrize("took_s", [math.nan, -1.0, math.inf])
def test_what_is_no_duration_is_left_out(took_s: float, told: list[tuple[str, float]]) -> None:
    bench = bench_with("spot")
    bench.offered(offer("g0"))
    bench.step(Demanded("a", NONE, (Switched("g0", 1, took_s),)))
    assert told == []
    bench.step(Demanded("a", NONE, (Switched("g0", 1, 1.5),)))
    assert told == [("g0", 1.5)]


@pytest.mark.parametrize(("took_s", "is_taken"), [(1.0, True), (60.0, False)])
def test_what_a_switch_took_decides_over_the_next_one(took_s: float, is_taken: bool) -> None:
    bench = bench_with("rose")
    # 1,600 tokens at 100/s: sixteen seconds, eight with a second replica.
    work = (JobFigures("", 16, 1_600.0),)
    bench.step(Demanded("gw", (JobFigures("", 1, 1.0),)))
    bench.offered(offer("g0"))
    for _ in range(int(took_s)):
        bench.now_s += 1.0
        bench.step(Demanded("gw", (JobFigures("", 1, 1.0),)))
        bench.offered(offer("g0", epoch=1))
    bench.step(Demanded("gw", (JobFigures("", 1, 1.0),), (Switched("g0", 1, took_s),)))
    bench.step(Demanded("gw", work))
    bench.offered(offer("g0", epoch=1), offer("g1"))
    leases = [lease.replica for lease in bench.core.status(bench.now_s).leases]
    assert leases == (["g0", "g1"] if is_taken else ["g0"])


def test_a_switch_is_read_as_it_is_sent() -> None:
    report = pb.DemandReport(gateway="gw", switches=[pb.Switch(replica="g0", epoch=4, took_s=2.25)])
    assert demanded(report) == Demanded("gw", (), (Switched("g0", 4, 2.25),))
