"""Leases follow the gateways' reports; without a report everything counts as needed."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from core_cases import JOB, CoreBench, offer
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import Offer, ReplicaKind
from rose.errors import ConfigError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import PAUSE_S, REPORT_TTL_S, DemandBook, JobFigures
from rose.scheduler.core.messages import Command, Demanded, LogRecord, ReplicaDrained
from rose.scheduler.wire import demanded

NONE = JobFigures("")
# Work for more turns than the replicas here have places.
MUCH = JobFigures("", 200, 1e5, 400.0)


def bench_with(*offers: Offer) -> CoreBench:
    bench = CoreBench().with_job()
    bench.attach()
    if offers:
        bench.offered(*offers)
    return bench


def report(bench: CoreBench, *jobs: JobFigures, gateway: str = "gw") -> None:
    bench.step(Demanded(gateway, jobs))


def leased(bench: CoreBench) -> list[str]:
    return sorted(lease.replica for lease in bench.core.status(bench.now_s).leases)


class Player:
    """A node that offers, keeps epochs and drains, and a gateway that reports, twice a second."""

    def __init__(self, bench: CoreBench, *offers: Offer) -> None:
        self.bench, self.offers = bench, {each.replica: each for each in offers}
        self.granted: Counter[str] = Counter()
        self.released_at_s: list[float] = []

    def play(self, seconds: float, demand: Callable[[float], JobFigures]) -> None:
        for tick in range(int(2 * seconds)):
            report(self.bench, demand(tick / 2))
            self.note()
            self.bench.offered(*self.offers.values())
            self.note()
            self.bench.now_s += 0.5

    def note(self) -> None:
        for action in list(self.bench.actions):
            if isinstance(action, LogRecord) and action.event == "lease_granted":
                name, epoch = str(action.fields["replica"]), action.fields["epoch"]
                self.granted[name] += 1
                self.offers[name] = replace(self.offers[name], epoch=epoch)  # type: ignore[arg-type]
            if isinstance(action, Command) and action.command.HasField("release"):
                told = action.command.release
                self.released_at_s.append(self.bench.now_s)
                self.bench.step(ReplicaDrained(1, told.replica, told.epoch, 0))


def test_a_fleet_whose_gateways_never_reported_is_leased_as_it_is_offered() -> None:
    bench = bench_with(offer("g0"), offer("g1"))
    assert leased(bench) == ["g0", "g1"]
    [job] = bench.core.status(bench.now_s).jobs
    assert not job.demand_known


def test_without_turns_no_guest_is_leased_and_the_first_turn_brings_one_at_once() -> None:
    bench = bench_with()
    report(bench)
    bench.offered(offer("g0"), offer("g1"), offer("d0", kind=ReplicaKind.DEDICATED))
    assert leased(bench) == ["d0"]
    bench = bench_with()
    report(bench)
    bench.offered(offer("g0"), offer("g1"))
    assert leased(bench) == []
    report(bench, JobFigures("", 1, 20.0))
    assert leased(bench) == ["g0"], "in the very step of the report"
    assert bench.kinds() == ["lease"]


def test_the_first_turn_waits_for_no_rest_after_a_replica_was_given_back() -> None:
    bench = bench_with()
    player = Player(bench, offer("g0"))
    player.play(2.0, lambda s: MUCH)
    player.play(40.0, lambda s: NONE if not player.released_at_s else MUCH)
    [released_s] = player.released_at_s
    assert player.granted["g0"] == 2
    assert leased(bench) == ["g0"]
    assert 20.0 < released_s - 102.0 < 40.0


def test_gateways_add_up_and_a_silent_one_is_forgotten() -> None:
    book = DemandBook()
    book.hear("a", [JobFigures("", 3, 30.0, 7.0)], 10.0)
    # Callers name jobs as they like: all turns get what the one job of this scheduler leased.
    book.hear("b", [JobFigures(JOB, 2, 50.0), JobFigures("run-7", 1, 9.0)], 12.0)
    assert book.figures(JOB, 12.0) == JobFigures(JOB, 6, 89.0, 7.0)
    book.hear("b", [JobFigures(JOB, 1, 10.0)], 13.0)
    assert book.figures(JOB, 13.0) == JobFigures(JOB, 4, 40.0, 7.0)
    assert book.figures(JOB, 10.0 + REPORT_TTL_S) == JobFigures(JOB, 1, 10.0)
    demand = book.demand(JOB, 4, 13.0 + REPORT_TTL_S)
    assert (demand.turns, demand.owed_tokens, demand.step) == (0.0, 0.0, 4)


def test_a_gateway_that_died_asks_for_nothing_and_its_guests_are_given_back() -> None:
    bench = bench_with()
    player = Player(bench, offer("g0"))
    player.play(2.0, lambda s: MUCH)
    for _ in range(100):
        bench.offered(*player.offers.values())
        player.note()
        bench.now_s += 0.5
    assert leased(bench) == []
    assert len(player.released_at_s) == 1


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, -math.inf])
def test_what_is_no_figure_is_no_work_but_a_turn_counts(bad: float) -> None:
    assert JobFigures("", -4, bad, 5.0).cleaned() == NONE
    assert JobFigures("", 4, bad, bad).cleaned() == JobFigures("", 4, 4.0, 0.0)


@given(st.integers(-9, 2**32 - 1), st.floats(), st.floats())
def test_no_report_breaks_a_decision(turns: int, owed_tokens: float, made_tok_s: float) -> None:
    bench = bench_with()
    report(bench, JobFigures("", turns, owed_tokens, made_tok_s))
    bench.offered(offer("g0"), offer("g1"))
    assert bool(leased(bench)) is (turns > 0)


@pytest.mark.parametrize(("work_s", "pause_s"), [(40, 20), (5, 20), (120, 24)])
def test_short_pauses_between_rounds_of_rollouts_change_no_lease(work_s: int, pause_s: int) -> None:
    bench = bench_with()
    player = Player(bench, offer("g0"), offer("g1"), offer("g2"))
    player.play(1_800.0, lambda s: MUCH if s % (work_s + pause_s) < work_s else NONE)
    assert player.granted == {"g0": 1, "g1": 1, "g2": 1}
    assert player.released_at_s == []


def test_longer_pauses_are_sat_out_after_a_few_of_them() -> None:
    bench = bench_with()
    player = Player(bench, offer("g0"), offer("g1"))
    # Rounds end in a long tail that one replica holds, then the trainer trains.
    tail = JobFigures("", 3, 3e3, 60.0)
    player.play(3_600.0, lambda s: MUCH if s % 180 < 60 else tail if s % 180 < 100 else NONE)
    assert 0 < len(player.released_at_s) <= 10
    assert max(player.released_at_s) < 1_100.0
    assert leased(bench) == ["g0", "g1"]


def test_what_follows_turns_in_flight_counts_by_how_long_it_has_gone_on() -> None:
    bench = bench_with()
    # Agents: short turns, one after the other, more of them than one replica has places.
    flow = JobFigures("", 16, 20.0, 100.0)
    player = Player(bench, offer("d0", kind=ReplicaKind.DEDICATED), offer("g0"))
    player.play(5.0, lambda s: flow)
    assert leased(bench) == ["d0"], "a burst is over before a switch has paid"
    player.play(30.0, lambda s: flow)
    assert leased(bench) == ["d0", "g0"]


def test_a_pause_ends_work_only_when_it_is_long() -> None:
    book = DemandBook()
    flow = JobFigures("", 1, 0.0, 10.0)
    for seconds in (0.0, 20.0, 40.0):
        book.hear("gw", [flow], seconds)
        owed_tokens = book.demand(JOB, 0, seconds).owed_tokens
    assert owed_tokens == 1.0 + 10.0 * 40.0
    book.hear("gw", [flow], 40.0 + PAUSE_S)
    assert book.demand(JOB, 0, 40.0 + PAUSE_S).owed_tokens == 1.0


def test_a_restarted_scheduler_leases_as_before_until_it_hears_a_gateway() -> None:
    bench = bench_with()
    report(bench)
    bench.offered(offer("g0"))
    assert leased(bench) == []
    again = CoreBench(store=bench.store)
    again.attach()
    again.offered(offer("g0"))
    assert leased(again) == ["g0"]
    player = Player(again, offer("g0", epoch=1))
    player.play(60.0, lambda s: NONE)
    assert leased(again) == []


def test_a_restarted_gateway_is_counted_twice_for_a_moment_only() -> None:
    bench = bench_with()
    report(bench, JobFigures("", 8, 80.0), gateway="host:1/a")
    bench.now_s += 1.0
    report(bench, JobFigures("", 2, 20.0), gateway="host:1/b")
    bench.now_s += REPORT_TTL_S - 1.0
    report(bench, JobFigures("", 2, 20.0), gateway="host:1/b")
    [job] = bench.core.status(bench.now_s).jobs
    assert (job.demand_known, job.turns, job.owed_tokens) == (True, 2, 20.0)


def test_a_leased_replica_that_takes_no_turns_does_not_keep_the_job_waiting() -> None:
    bench = bench_with()
    bench.announce(1)
    bench.announce(2)
    few = JobFigures("", 3, 300.0)
    # Bound 1: at version 0 it is leased and stale, and it never catches up.
    stale = offer("d0", kind=ReplicaKind.DEDICATED, policy_version=0)
    player = Player(bench, stale, offer("g0", policy_version=2))
    player.play(10.0, lambda s: few)
    assert leased(bench) == ["d0"]
    player.play(10.0, lambda s: few)
    assert leased(bench) == ["d0", "g0"]


def test_a_report_says_whose_it_is() -> None:
    job = pb.JobDemand(job="j", turns=2, owed_tokens=3.5, made_tok_s=1.5)
    event = demanded(pb.DemandReport(gateway="gw", jobs=[job]))
    assert event == Demanded("gw", (JobFigures("j", 2, 3.5, 1.5),))
    with pytest.raises(ConfigError, match="name"):
        demanded(pb.DemandReport())
