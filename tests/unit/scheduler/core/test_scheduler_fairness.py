"""Shares of several jobs, the cost of switches, and the pace of a large fleet."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from core_cases import JOB, CoreBench, bench_with, offer
from service_cases import Bench, FakeNode, shows

from elastic_scheduler import HarvestMode, LeaseDecision, Offer, Situation, SwitchKind
from elastic_scheduler.capacity import CapacityPolicy, PolicyMode
from elastic_scheduler.policies.baselines import SpotPolicy
from elastic_scheduler.policies.rose import RosePolicy
from rose.cli.cluster.compare import NodeLending
from rose.compare.node_metrics import HostLatencies, HostReading
from rose.compare.run import ComparisonRun, Plan
from rose.errors import RefusedError
from rose.operate.client import PolicyClient
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import JobFigures, Switched
from rose.scheduler.core.leasing import PACE_S, SMALL_FLEET, LeaseTimes
from rose.scheduler.core.messages import (
    Action,
    Command,
    Demanded,
    Detached,
    HarvestSet,
    JobRegistered,
    LogRecord,
    Offered,
    PublishTable,
    QuotasHeard,
    ReplicaDrained,
    RevokeAsked,
    TakenBack,
    VersionAnnounced,
)
from rose.scheduler.core.scheduler_core import TABLE_INTERVAL_S, SchedulerCore
from rose.scheduler.persistence import load
from tests.fakes.memory_store import InMemoryStore

SWITCH_S = 1.0


class StandinFleet:
    """One node's guests. `served_s`: by job, seconds in which a guest took its turns."""

    def __init__(
        self,
        guests: int,
        jobs: Mapping[str, float],
        hold_s: float = 10.0,
        quotas: Mapping[str, str] | None = None,
    ) -> None:
        self.bench = CoreBench()
        self.bench.core = SchedulerCore(
            load(self.bench.store.entries),
            HarvestMode.ACTIVE,
            LeaseTimes(5.0, 1.0, 1.0),
            RosePolicy(hold_s),
            quotas=quotas,
        )
        for job, weight in jobs.items():
            self.bench.step(JobRegistered(job, 1, weight=weight))
            self.bench.step(VersionAnnounced(job, 1, 0, "http://t"))
        self.bench.attach()
        self.offers = {f"g{n}": offer(f"g{n}", model="m") for n in range(guests)}
        self.ready_s: dict[str, tuple[float, str, int]] = {}
        self.served_s: Counter[str] = Counter()
        self.switches = 0
        self.measured: list[Switched] = []

    def play(self, seconds: float, demand: Callable[[float], tuple[JobFigures, ...]]) -> None:
        """Tick on; `demand` of all jobs at a time since the beginning of this play."""
        for tick in range(int(seconds)):
            self.bench.now_s += 1.0
            self._settle()
            measured, self.measured = tuple(self.measured), []
            self._note(self.bench.step(Demanded("gw", demand(tick), measured)))
            self.bench.offered(*self.offers.values())
            self._note(self.bench.actions)
            for row in self.bench.table.replicas:
                if row.leased and row.healthy:
                    assert row.held_job in ("", row.job)
                    self.served_s[row.job] += 1

    def play_until(self, switches: int, demand: Callable[[float], tuple[JobFigures, ...]]) -> None:
        """Tick on until so many times a guest had changed its job."""
        for _ in range(100 * switches):
            self.play(1, demand)
            if self.switches >= switches:
                return
        raise AssertionError(f"{self.switches} switches only")

    def _settle(self) -> None:
        """Switches that took their time are done."""
        for name, (at_s, job, epoch) in list(self.ready_s.items()):
            if self.bench.now_s >= at_s:
                self.switches += self.offers[name].job not in ("", job)
                self._say(name, job=job, policy_version=1)
                self.measured.append(Switched(name, epoch, SWITCH_S))
                del self.ready_s[name]

    def _say(self, name: str, **changes: object) -> None:
        said: Offer = self.offers[name]
        self.offers[name] = replace(said, **changes)  # type: ignore[arg-type]

    def _note(self, actions: list[Action]) -> None:
        for action in list(actions):
            if isinstance(action, LogRecord) and action.event == "lease_granted":
                name, epoch = str(action.fields["replica"]), int(str(action.fields["epoch"]))
                job = str(action.fields["job"])
                self._say(name, epoch=epoch)
                self.ready_s[name] = (self.bench.now_s + SWITCH_S, job, epoch)
            if isinstance(action, Command) and action.command.HasField("release"):
                told = action.command.release
                self._note(self.bench.step(ReplicaDrained(1, told.replica, told.epoch, 0)))


# ---- shares ----


# More work than all replicas here have places for.
MUCH = 500


def busy(job: str, turns: int = MUCH) -> JobFigures:
    return JobFigures(job, turns, 1e3 * turns, 400.0)


@pytest.mark.parametrize("guests", [1, 3])
@pytest.mark.parametrize("pause_s", [0, 4], ids=["steady", "pauses between rounds"])
def test_two_equal_jobs_get_equal_guest_time(guests: int, pause_s: int) -> None:
    """Trainers that stop asking while they train, each in its own rhythm, lose nothing by it."""
    fleet = StandinFleet(guests, {"a": 1.0, "b": 1.0})

    def rounds(_: float) -> tuple[JobFigures, ...]:
        now_s = fleet.bench.now_s
        periods_s = {"a": 13, "b": 17}
        return tuple(busy(j, MUCH if now_s % s >= pause_s else 0) for j, s in periods_s.items())

    fleet.play_until(80, rounds)
    a, b = fleet.served_s["a"], fleet.served_s["b"]
    assert abs(a - b) < 0.1 * (a + b) / 2


def test_five_jobs_share_by_their_weights() -> None:
    weights = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 0.5, "e": 0.5}
    fleet = StandinFleet(8, weights)
    fleet.play(900.0, lambda s: tuple(map(busy, weights)))
    whole = sum(fleet.served_s.values())
    for job, weight in weights.items():
        assert fleet.served_s[job] / whole == pytest.approx(weight / 8, rel=0.1)


def test_a_job_that_floods_starves_no_other() -> None:
    fleet = StandinFleet(4, {"calm": 1.0, "flood": 1.0})
    fleet.play(100.0, lambda s: (busy("calm", 64),))
    fleet.play(300.0, lambda s: (busy("calm", 64), busy("flood", 100_000)))
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


def quota_of(fleet: StandinFleet, seconds: int, pods: int | None) -> tuple[int, str]:
    """Play on, with so many placeholder pods of job a or none read; return its guests, and why."""
    for _ in range(seconds):
        if pods is not None:
            fleet._note(fleet.bench.step(QuotasHeard(fleet.bench.now_s, {"a": pods})))
        fleet.play(1.0, lambda s: (busy("a"),))
    [a] = fleet.bench.core.status(fleet.bench.now_s).jobs
    return a.guests, a.held_back.partition(":")[0]


def test_placeholder_pods_bound_guests_and_a_count_that_is_old_admits_none() -> None:
    fleet = StandinFleet(4, {"a": 1.0}, quotas={"a": "training"})
    unread = "no new guests"
    assert quota_of(fleet, 30, None) == (0, unread), "no pod was ever read"
    assert quota_of(fleet, 30, 0) == (0, "no guests")
    assert quota_of(fleet, 30, 3) == (3, "")
    assert quota_of(fleet, 2, 2) == (2, ""), "one pod was preempted"
    assert quota_of(fleet, 30, None) == (2, unread), "what it has goes on"
    [lease] = [e for e in fleet.bench.core.status(fleet.bench.now_s).leases if e.replica == "g0"]
    fleet._note(fleet.bench.step(RevokeAsked(lease.replica, "for this test")))
    assert quota_of(fleet, 30, None) == (1, unread), "and nothing takes its place"
    assert quota_of(fleet, 30, 4) == (4, "")
    fleet.bench.step(JobRegistered("a", 1, max_guests=1))
    assert quota_of(fleet, 5, 4) == (1, ""), "the stricter of both"
    said = [e.fields for e in fleet.bench.step(QuotasHeard(fleet.bench.now_s, {"a": 0}))
            if isinstance(e, LogRecord) and e.event == "quota_changed"]  # fmt: skip
    assert said == [{"job": "a", "guests": 0}]


def test_what_may_be_lent_is_counted_by_node_and_nothing_while_it_is_held() -> None:
    core = StandinFleet(3, {"a": 1.0})
    core.play(3.0, lambda s: ())
    assert core.bench.core.lendable(core.bench.now_s) == {"n0": 3}
    core.bench.step(HarvestSet(HarvestMode.ACTIVE, None))
    core.bench.step(HarvestSet(HarvestMode.HOLD, "g1"))
    assert core.bench.core.lendable(core.bench.now_s) == {"n0": 2}
    core.bench.step(HarvestSet(HarvestMode.HOLD, None))
    assert core.bench.core.lendable(core.bench.now_s) == {}
    assert core.bench.core.lendable(core.bench.now_s + 60.0) == {}, "nothing is heard of it"


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


# ---- switches ----


NONE = (JobFigures(""),)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    told: list[tuple[str, float]] = []

    def switched(self: object, each: Offer, took_s: float, switch: SwitchKind) -> None:
        told.append((each.replica, took_s))

    monkeypatch.setattr("elastic_scheduler.policies.baselines.SpotPolicy.switched", switched)
    return told


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


# ---- compared ----


class NoTime:
    """Clock of a comparison that waits for nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def test_a_comparison_drains_the_guests_of_one_node_and_puts_them_back(bench: Bench) -> None:
    node, other = FakeNode(bench.stub), FakeNode(bench.stub, "n1")
    node.offer()
    other.offer(replica="g1", url="http://g1")
    await shows(bench, lambda snapshot: len(snapshot.replicas) == 2)
    seen: list[bool] = []
    nothing = HostLatencies({math.inf: 0.0}, 0.0, 0.0)

    def read() -> HostReading:
        assert isinstance(bench.store, InMemoryStore)
        stopped = {key for key in bench.store.now if key.startswith("harvest/")}
        assert stopped <= {"harvest/g0"}, "the other node's guest is left alone"
        seen.append(bool(stopped))
        return HostReading(nothing, nothing, 0.0, 0.0, 0.0)

    def compare() -> int:
        lending = NodeLending(PolicyClient(bench.address), "n0")
        lending.check_policy()
        on, off = pb.HARVEST_MODE_ACTIVE, pb.HARVEST_MODE_HOLD_AND_DRAIN
        run = ComparisonRun(Plan(pairs=2), lending, read, lambda _: None, on, off, NoTime())
        return len(run.measure())

    assert await asyncio.to_thread(compare) == 2
    assert (seen.count(True), seen.count(False)) == (4, 5)
    assert not (await bench.stub.Snapshot(pb.SnapshotRequest())).overrides
    await node.leave()
    await other.leave()


async def test_a_node_that_only_advises_is_not_compared(bench: Bench) -> None:
    node = FakeNode(bench.stub)
    node.offer()
    await shows(bench, lambda snapshot: len(snapshot.replicas) == 1)
    client = PolicyClient(bench.address)
    policy = CapacityPolicy(name="careful", mode=PolicyMode.ADVISORY)
    await asyncio.to_thread(client.apply, policy)
    with pytest.raises(RefusedError, match="Advisory"):
        await asyncio.to_thread(NodeLending(client, "n0").check_policy)
    await node.leave()


# ---- a large fleet ----


NODES = 5
EACH = SMALL_FLEET // NODES + 1


def offers_of(number: int) -> list[Offer]:
    node = f"n{number}"
    return [offer(f"{node}.g{each}", node=node, ttl_s=3.0) for each in range(EACH)]


def leased_fleet() -> CoreBench:
    bench = CoreBench().with_job()
    for number in range(NODES):
        bench.attach(number, f"n{number}")
    play(bench, 10)
    assert len(bench.core.status(bench.now_s).leases) == NODES * EACH > SMALL_FLEET
    return bench


def play(bench: CoreBench, tenths: int, nodes: int = NODES) -> None:
    for _ in range(tenths):
        bench.at(bench.now_s + 0.1)
        for number in range(nodes):
            bench.step(Offered(number, tuple(offers_of(number))))


def leases(bench: CoreBench) -> dict[str, pb.LeaseView]:
    return {lease.replica: lease for lease in bench.core.status(bench.now_s).leases}


def leased(bench: CoreBench) -> set[str]:
    return {row.id for row in bench.table.replicas if row.leased}


def test_every_lease_of_a_large_fleet_is_renewed_long_before_it_runs_out() -> None:
    bench = leased_fleet()
    for _ in range(80):
        play(bench, 1)
        assert min(lease.expires_in_s for lease in leases(bench).values()) > 3.5
    assert len(leased(bench)) == NODES * EACH


def test_a_lease_runs_out_at_the_next_event_of_a_large_fleet_whatever_it_is() -> None:
    bench = leased_fleet()
    bench.now_s += 5.0
    bench.step(Offered(0, ()))
    assert not leases(bench)
    assert not leased(bench)


def test_a_silent_node_of_a_large_fleet_loses_its_leases_in_time() -> None:
    bench = leased_fleet()
    play(bench, 52, nodes=NODES - 1)
    silent = {each.replica for each in offers_of(NODES - 1)}
    # Offers live for three seconds, and what is not offered is not renewed.
    assert silent.isdisjoint(leased(bench))
    play(bench, 30, nodes=NODES - 1)
    assert silent.isdisjoint(leases(bench))
    assert len(leased(bench)) == (NODES - 1) * EACH


def test_a_stop_releases_all_guests_of_a_large_fleet_at_once() -> None:
    bench = leased_fleet()
    bench.step(HarvestSet(HarvestMode.HOLD_AND_DRAIN, None))
    assert bench.answer() == NODES * EACH
    assert {lease.state for lease in leases(bench).values()} == {"releasing"}


def test_revocations_in_a_large_fleet_reach_gateways_within_its_pace() -> None:
    bench = leased_fleet()
    for each in offers_of(0):
        bench.step(TakenBack(0, each.replica, leases(bench)[each.replica].epoch, "burst"))
        assert each.replica not in leases(bench)
    bench.at(bench.now_s + PACE_S)
    assert len(leased(bench)) == (NODES - 1) * EACH


def test_a_lost_node_of_a_large_fleet_takes_its_leases_along_at_once() -> None:
    bench = leased_fleet()
    bench.step(Detached(0))
    assert len(leases(bench)) == (NODES - 1) * EACH
    bench.at(bench.now_s + PACE_S)
    assert len(leased(bench)) == (NODES - 1) * EACH


def test_what_a_large_fleet_gets_back_is_leased_again() -> None:
    bench = leased_fleet()
    name = offers_of(0)[0].replica
    bench.step(RevokeAsked(name, "by hand"))
    assert name not in leases(bench)
    play(bench, 20)
    assert leases(bench)[name].job == JOB
    assert name in leased(bench)


def test_a_large_fleet_is_told_of_no_table_while_its_nodes_say_the_same() -> None:
    bench = leased_fleet()
    play(bench, 10)
    revision = bench.table.revision
    play(bench, 50)
    assert bench.table.revision <= revision + 6


# ---- paced tables ----


MOMENT_S = 0.01
LARGE, SMALL = SMALL_FLEET + 16, 16


class CountingPolicy(SpotPolicy):
    """Leases all that is offered, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, situation: Situation) -> LeaseDecision:
        self.asked += 1
        return super().decide(situation)


def offers_of_one(count: int, number: int = 0) -> tuple[Offer, ...]:
    return tuple(offer(f"n{number}.g{each:03}", node=f"n{number}") for each in range(count))


def leased_node(count: int) -> tuple[CoreBench, CountingPolicy]:
    """One node's replicas, all leased; two seconds later, so that nothing is left to say."""
    bench, policy = CoreBench(), CountingPolicy()
    times = LeaseTimes(cooldown_s=60.0)
    bench.core = SchedulerCore(load(()), HarvestMode.ACTIVE, times, policy)
    bench.with_job().attach()
    for _ in range(20):
        bench.at(bench.now_s + 0.1)
        bench.step(Offered(1, offers_of_one(count)))
    assert len(leased(bench)) == count
    return bench, policy


def revoke_each(bench: CoreBench, count: int) -> list[float]:
    """A revocation each moment; when tables were published."""
    times_s = []
    for each in offers_of_one(count):
        bench.now_s += MOMENT_S
        bench.step(RevokeAsked(each.replica, "a storm"))
        if any(isinstance(action, PublishTable) for action in bench.actions):
            times_s.append(bench.now_s)
    return times_s


def test_a_storm_of_changes_in_a_large_fleet_is_told_once_each_pace() -> None:
    bench, _ = leased_node(LARGE)
    began_s = bench.now_s
    times_s = revoke_each(bench, LARGE)
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert min(gaps_s) >= PACE_S - 1e-9
    # None is left out either: the last change follows within its pace.
    assert len(times_s) >= (bench.now_s - began_s) / (PACE_S + MOMENT_S) - 1
    bench.at(bench.now_s + PACE_S)
    assert not leased(bench)


@pytest.mark.parametrize("count", [SMALL_FLEET, SMALL])
def test_a_small_fleet_is_told_of_each_change_at_once(count: int) -> None:
    bench, _ = leased_node(count)
    assert len(revoke_each(bench, count)) == count


def test_a_table_of_a_large_fleet_lags_by_its_pace_at_most() -> None:
    bench, _ = leased_node(LARGE)
    over: dict[str, float] = {}
    for each in offers_of_one(LARGE):
        bench.now_s += MOMENT_S
        bench.step(RevokeAsked(each.replica, "a storm"))
        over[each.replica] = bench.now_s
        still = leased(bench) & over.keys()
        assert all(bench.now_s - over[name] < PACE_S + MOMENT_S for name in still)


def test_a_quiet_large_fleet_is_told_each_second_and_no_more() -> None:
    bench, _ = leased_node(LARGE)
    revision, began_s = bench.table.revision, bench.now_s
    while bench.now_s < began_s + 5 * TABLE_INTERVAL_S:
        bench.at(bench.now_s + 0.1)
        bench.step(Offered(1, offers_of_one(LARGE)))
    assert 4 <= bench.table.revision - revision <= 5


def test_a_large_fleet_is_decided_over_at_its_pace_too() -> None:
    bench, policy = leased_node(LARGE)
    asked, began_s = policy.asked, bench.now_s
    revoke_each(bench, LARGE)
    # Once a second its nodes are judged, and decided over then as well.
    most = (bench.now_s - began_s) / PACE_S + (bench.now_s - began_s) + 2
    assert 1 <= policy.asked - asked <= most


def test_a_fleet_that_becomes_small_is_told_at_once_again() -> None:
    bench, _ = leased_node(LARGE)
    bench.attach(2, "n1")
    bench.step(Offered(2, offers_of_one(SMALL, 1)))
    bench.at(bench.now_s + 1.0)
    bench.step(Offered(2, offers_of_one(SMALL, 1)))
    bench.step(Detached(1))
    assert all(name.startswith("n1.") for name in leased(bench))
    before = bench.table.revision
    bench.step(RevokeAsked("n1.g000", "by hand"))
    assert bench.table.revision == before + 1
