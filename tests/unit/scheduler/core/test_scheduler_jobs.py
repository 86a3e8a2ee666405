"""Jobs of a scheduler: their names, runs, versions and demand are never taken for another's."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from core_cases import JOB, CoreBench, bench_with, offer
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import Offer, ReplicaKind
from rose.errors import ConfigError, RefusedError, RunFencedError, RunHeldError
from rose.main.scheduler import standing_jobs
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import PAUSE_S, REPORT_TTL_S, DemandBook, JobFigures, Switched
from rose.scheduler.core.messages import (
    Command,
    Demanded,
    JobDropped,
    JobEnded,
    JobRegistered,
    LogRecord,
    ReplicaDrained,
    RunEnded,
    RunRenewed,
    Tick,
    VersionAnnounced,
)
from rose.scheduler.core.runs import Claim
from rose.scheduler.persistence import JobRecord, load
from rose.scheduler.wire import asked, demanded, event_of, offer_of
from tests.fakes.memory_store import InMemoryStore


def two_jobs() -> CoreBench:
    bench = CoreBench().with_job()
    bench.step(JobRegistered("other", 0))
    bench.attach()
    return bench


def leased_to(bench: CoreBench, job: str, *offers: Offer) -> CoreBench:
    """Only that job has work."""
    bench.step(Demanded("gw", (JobFigures(job, 100, 1e6, 100.0),)))
    bench.offered(*offers)
    assert bench.row().job == job
    return bench


def test_each_job_has_a_chain_of_its_own_also_after_a_restart() -> None:
    bench = two_jobs()
    bench.announce(1)
    bench.announce(2)
    bench.step(VersionAnnounced("other", 1, 0, "http://o"))
    for each in (bench, CoreBench(store=bench.store)):
        jobs = each.core.status(each.now_s).jobs
        assert [(job.job, job.latest_version) for job in jobs] == [(JOB, 2), ("other", 1)]
        told = [c.version for c in each.attach(2, "n1") if c.HasField("version")]
        assert [(v.job, v.version) for v in told] == [(JOB, 1), (JOB, 2), ("other", 1)]
        rows = [(row.job, row.latest_version, row.max_staleness) for row in each.table.jobs]
        assert rows == [(JOB, 2, 1), ("other", 1, 0)]


def test_weights_of_one_job_never_count_as_anothers() -> None:
    bench = two_jobs()
    bench.announce(1)
    bench.step(VersionAnnounced("other", 1, 0, "http://o"))
    leased_to(bench, "other", offer(job=JOB, policy_version=1))
    row = bench.row()
    assert (row.leased, row.held_job, row.healthy) == (True, JOB, False)
    # The same number, now of the job that leased it.
    bench.offered(offer(job="other", policy_version=1, epoch=row.lease_epoch))
    assert bench.row().healthy
    # And the version of an older life of the replica is none of it.
    bench.offered(offer(job="other", policy_version=2, epoch=row.lease_epoch))
    assert not bench.row().healthy


def test_a_replica_that_is_leased_to_another_job_takes_no_turns_from_that_moment_on() -> None:
    bench = two_jobs()
    bench.announce(1)
    leased_to(bench, JOB, offer(job=JOB, policy_version=1))
    assert bench.row().healthy
    epoch = bench.row().lease_epoch
    bench.step(JobEnded(JOB))
    assert [row.job for row in bench.table.jobs] == ["other"]
    bench.step(ReplicaDrained(1, "g0", epoch, 0))
    leased_to(bench, "other", offer(job=JOB, policy_version=1, epoch=epoch))
    assert not bench.row().healthy


def test_the_base_model_is_version_0_of_jobs_of_that_model_only() -> None:
    bench = CoreBench()
    bench.step(JobRegistered("small", 0, "m-small"))
    bench.step(JobRegistered("large", 0, "m-large"))
    bench.attach()
    both = offer(model="m-small", models=("m-large",))
    leased_to(bench, "large", both)
    assert not bench.row().healthy
    bench.offered(offer(model="m-large", models=("m-small",), epoch=1))
    assert bench.row().healthy


def test_what_cannot_run_a_jobs_model_is_not_leased_to_it() -> None:
    bench = CoreBench()
    bench.step(JobRegistered("large", 0, "m-large"))
    bench.attach()
    bench.offered(offer(model="m-small"))
    assert not bench.row().leased


def test_an_ended_job_gives_all_back_and_its_name_goes_on_where_it_was() -> None:
    bench = two_jobs()
    bench.announce(1)
    bench.announce(2)
    leased_to(bench, JOB, offer(job=JOB, policy_version=2))
    bench.step(JobEnded(JOB))
    assert bench.answer() == 1
    assert "release" in bench.kinds()
    with pytest.raises(RefusedError, match="unknown"):
        bench.step(JobEnded(JOB))
    with pytest.raises(RefusedError, match="RegisterJob"):
        bench.announce(3)
    for each in (bench, CoreBench(store=bench.store)):
        assert [job.job for job in each.core.status(each.now_s).jobs] == ["other"]
    again = CoreBench(store=bench.store).with_job()
    assert again.answer() == 2
    with pytest.raises(RefusedError, match="newer than 2"):
        again.announce(1)
    again.announce(3)
    # Its older versions are not kept.
    kept = [e.key for e in bench.store.entries if e.key.startswith(f"versions/{JOB}/")]
    assert kept == [f"versions/{JOB}/{version:020d}" for version in (2, 3)]


def test_a_job_with_versions_keeps_its_model() -> None:
    bench = CoreBench()
    bench.step(JobRegistered("j", 0, "m"))
    bench.step(JobRegistered("j", 0, "n"))
    bench.step(VersionAnnounced("j", 1, 0, "http://t"))
    with pytest.raises(RefusedError, match="name of its own"):
        bench.step(JobRegistered("j", 0, "m"))


def test_demand_is_each_jobs_own_once_there_are_several() -> None:
    bench = two_jobs()
    figures = (JobFigures(JOB, 3, 30.0), JobFigures("other", 5, 50.0), JobFigures("", 9, 90.0))
    bench.step(Demanded("gw", figures))
    assert [job.turns for job in bench.core.status(bench.now_s).jobs] == [3, 5]
    bench.step(JobEnded("other"))
    assert [job.turns for job in bench.core.status(bench.now_s).jobs] == [17]


def test_messages_carry_jobs() -> None:
    said = pb.Offer(
        replica="a", url="http://a", kind=1, ttl_s=3, job="j", policy_version=2,
        model="m", models=["n", "o"], near=["n"],
    )  # fmt: skip
    event = event_of(pb.NodeReport(node="n", offers=pb.Offers(offers=[said])), 1)
    [each] = event.offers  # type: ignore[union-attr]
    assert (each.job, each.model, each.models, each.near) == ("j", "m", ("n", "o"), ("n",))
    request = pb.RegisterJobRequest(job="j", max_staleness=2, model="m", max_guests=3)
    assert asked(request) == JobRegistered("j", 2, "m", 1.0, 3)


# ---- versions ----


def test_a_version_is_told_to_all_nodes_at_once() -> None:
    bench = CoreBench().with_job()
    bench.attach(1, "n0")
    bench.attach(2, "n1")
    bench.announce(1)
    assert bench.answer() == 2
    for stream in (1, 2):
        [command] = bench.commands(stream)
        assert (command.version.job, command.version.version, command.version.url) == (
            JOB, 1, "http://t",
        )  # fmt: skip
    assert bench.table.latest_version == 1


def test_a_late_node_gets_the_chain_in_order_also_after_a_restart() -> None:
    bench = CoreBench().with_job()
    for version in range(1, 13):
        bench.announce(version)
    for each in (bench, CoreBench(store=bench.store)):
        told = [c.version.version for c in each.attach() if c.HasField("version")]
        assert told == list(range(1, 13))


def test_a_replica_ahead_of_the_chain_runs_foreign_weights() -> None:
    bench = CoreBench().with_job()
    bench.attach()
    bench.offered(offer(policy_version=3))
    assert not bench.row().healthy


def test_versions_only_grow() -> None:
    bench = CoreBench().with_job()
    bench.announce(1)
    bench.announce(2)
    with pytest.raises(RefusedError, match="newer than 2"):
        bench.announce(1, url="http://other")
    with pytest.raises(RefusedError, match="parent"):
        bench.announce(5, parent=4)
    assert bench.core.status(0.0).latest_version == 2


def test_the_newest_may_be_announced_again_and_moved() -> None:
    bench = CoreBench().with_job()
    bench.attach()
    bench.announce(1)
    bench.announce(1)
    assert bench.answer() == 0
    bench.announce(1, url="http://moved")
    assert [c.version.url for c in bench.commands()] == ["http://moved"]


def test_a_job_registers_before_its_versions() -> None:
    bench = CoreBench()
    with pytest.raises(RefusedError, match="RegisterJob"):
        bench.announce(1)
    bench.with_job(3)
    bench.announce(1)
    bench.step(JobRegistered(JOB, 2))
    assert bench.answer() == 1
    assert bench.core.status(0.0).jobs[0].max_staleness == 2
    with pytest.raises(RefusedError, match="RegisterJob"):
        bench.step(VersionAnnounced("other", 2, 1, "http://t"))
    with pytest.raises(ConfigError):
        bench.step(JobRegistered("", 0))


def test_a_foreign_store_is_refused_with_one_line() -> None:
    store = InMemoryStore()
    store.write("epochs/g0", b"[1]")
    with pytest.raises(ConfigError, match="--store"):
        load(store.entries)


def test_malformed_offers_are_dropped_with_a_reason() -> None:
    good = pb.Offer(replica="a", url="http://a", kind=1, ttl_s=3)
    offers = [
        good,
        pb.Offer(replica="b", url="http://b", ttl_s=3),
        pb.Offer(replica="c", url="http://c", kind=1),
        pb.Offer(url="http://d", kind=1, ttl_s=3),
    ]
    event = event_of(pb.NodeReport(node="n", offers=pb.Offers(offers=offers)), 1)
    assert [each.replica for each in event.offers] == ["a"]  # type: ignore[union-attr]
    assert len(event.refused) == 3  # type: ignore[union-attr]


def test_no_offer_outlives_its_bound() -> None:
    message = pb.Offer(replica="a", url="http://a", kind=2, ttl_s=1e9)
    assert offer_of(message, "n").is_stale(0.0, 10.0)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError):
        asked(pb.SetHarvestRequest())


def test_a_base_replaces_the_chain_in_memory_and_in_the_store() -> None:
    bench = CoreBench().with_job()
    bench.attach()
    for version in (1, 2, 3):
        bench.announce(version)
    bench.announce(4, parent=4)
    assert [c.version.parent for c in bench.commands()] == [4]
    bench.announce(5)
    for each in (bench, CoreBench(store=bench.store)):
        told = [c.version for c in each.attach(2, "n1") if c.HasField("version")]
        assert [(v.version, v.parent) for v in told] == [(4, 4), (5, 4)]
        with pytest.raises(RefusedError, match="not newer than 5"):
            each.announce(3, parent=2)
        with pytest.raises(RefusedError, match="parent"):
            each.announce(6, parent=3)


def test_weights_of_the_run_before_take_no_turns_however_stale_a_job_allows() -> None:
    bench = CoreBench().with_job(max_staleness=9)
    bench.announce(1)
    bench.attach()
    bench.offered(offer(policy_version=1, job=JOB))
    assert bench.row().healthy
    bench.announce(2, parent=2)
    assert not bench.row().healthy
    bench.offered(offer(policy_version=2, job=JOB))
    assert bench.row().healthy


# ---- runs ----


ONE = Claim("run-1", "a", "host-1, process 11")
TWO = Claim("run-2", "b", "host-2, process 22")
# The first one's root, by a process that got its lock, or by one with a copy of it.
AGAIN = Claim("run-1", "c", "host-1, process 33")


def register(bench: CoreBench, claim: Claim | None, *, take_over: bool = False) -> int:
    bench.step(JobRegistered(JOB, 1, claim=claim, take_over=take_over))
    return bench.answer()


def announce(bench: CoreBench, version: int, claim: Claim | None) -> None:
    bench.step(VersionAnnounced(JOB, version, version - 1, "http://t", claim))


def begun(claim: Claim | None = ONE) -> CoreBench:
    bench = CoreBench()
    bench.step(Tick(wall_s=0.0))
    bench.step(Tick(wall_s=1_700_000_000.0))
    register(bench, claim)
    return bench


def test_a_second_trainer_is_told_in_a_line_who_has_the_job_and_since_when() -> None:
    bench = begun()
    with pytest.raises(RunHeldError) as refused:
        register(bench, TWO)
    said = str(refused.value)
    assert "\n" not in said
    assert "host-1, process 11, since 2023-11-14 22:13:20 UTC" in said
    assert "--take-over" in said
    assert "for 10 s after its last sign" in said
    with pytest.raises(RunHeldError):
        register(bench, None)


def test_a_run_that_is_not_renewed_lapses_and_one_that_is_renewed_does_not() -> None:
    bench = begun()
    for now_s in (105.0, 112.0, 119.0):
        bench.at(now_s).step(RunRenewed(JOB, ONE))
        with pytest.raises(RunHeldError):
            register(bench, TWO)
    bench.at(128.9)
    with pytest.raises(RunHeldError):
        register(bench, TWO)
    bench.at(129.1)
    register(bench, TWO)
    assert bench.records()[0] == "run_began"
    with pytest.raises(RunFencedError, match="process 11 has lost job grpo to host-2, process 22"):
        bench.step(RunRenewed(JOB, ONE))


def test_a_lapsed_run_goes_on_where_nobody_came() -> None:
    bench = begun().at(200.0)
    bench.step(RunRenewed(JOB, ONE))
    announce(bench, 1, ONE)
    with pytest.raises(RunHeldError):
        register(bench, TWO)


def test_taking_over_fences_the_first_ones_versions_and_renewals() -> None:
    bench = begun()
    announce(bench, 1, ONE)
    assert register(bench, TWO, take_over=True) == 1
    assert "run_taken_over" in bench.records()
    for event in (RunRenewed(JOB, ONE), VersionAnnounced(JOB, 2, 1, "http://t", ONE)):
        with pytest.raises(RunFencedError, match="has lost job grpo to host-2"):
            bench.step(event)
    with pytest.raises(RunFencedError, match="names no run"):
        announce(bench, 2, None)
    announce(bench, 2, TWO)
    newest = bench.core.newest(JOB)
    assert newest is not None
    assert (newest.version, newest.run) == (2, "run-2")


def test_the_same_root_need_not_wait_and_a_copy_of_it_fences_the_original() -> None:
    bench = begun()
    register(bench, AGAIN)
    announce(bench, 1, AGAIN)
    with pytest.raises(RunFencedError):
        bench.step(RunRenewed(JOB, ONE))


def test_a_run_that_ended_in_order_leaves_its_job_at_once() -> None:
    bench = begun()
    bench.step(RunEnded(JOB, ONE))
    register(bench, TWO)
    with pytest.raises(RunFencedError):
        bench.step(RunEnded(JOB, ONE))


def test_a_new_leader_knows_the_run_and_gives_it_time_to_renew() -> None:
    first = begun()
    announce(first, 1, ONE)
    second = CoreBench(store=first.store).at(1_000.0)
    with pytest.raises(RunHeldError, match="host-1"):
        register(second, TWO)
    second.at(1_009.0).step(RunRenewed(JOB, ONE))
    second.at(1_018.0)
    with pytest.raises(RunHeldError):
        register(second, TWO)
    second.at(1_019.1)
    register(second, TWO)
    third = CoreBench(store=first.store).at(0.0)
    with pytest.raises(RunFencedError):
        third.step(RunRenewed(JOB, ONE))
    announce(third, 2, TWO)


def test_a_trainer_that_names_no_run_is_served_until_one_with_a_run_comes() -> None:
    bench = begun(None)
    announce(bench, 1, None)
    register(bench, None)
    register(bench, ONE)
    with pytest.raises(RunFencedError):
        announce(bench, 2, None)


def test_a_job_that_ended_is_free_and_its_trainer_is_told() -> None:
    bench = begun()
    bench.step(JobEnded(JOB))
    with pytest.raises(RefusedError, match="was ended or dropped"):
        bench.step(RunRenewed(JOB, ONE))
    register(bench, TWO)


def test_a_job_is_dropped_with_chain_and_run_but_its_numbers_stay_used() -> None:
    bench = begun()
    for version in (1, 2, 3):
        announce(bench, version, ONE)
    with pytest.raises(RunHeldError, match="--force, which fences it"):
        bench.step(JobDropped(JOB))
    bench.step(JobDropped(JOB, force=True))
    assert bench.answer() == 3
    with pytest.raises(RefusedError, match="was ended or dropped"):
        bench.step(RunRenewed(JOB, ONE))
    for each in (bench, CoreBench(store=bench.store)):
        assert each.core.status(each.now_s).jobs == []
        assert [c for c in each.attach(7, "n7") if c.HasField("version")] == []
        assert register(each, TWO, take_over=True) == 3
        with pytest.raises(RefusedError, match="not newer than 3"):
            announce(each, 3, TWO)
    with pytest.raises(RefusedError, match="unknown; `rose jobs list`"):
        bench.step(JobDropped("else"))


def test_a_dropped_jobs_replicas_serve_what_they_hold_until_the_next_base() -> None:
    bench = begun()
    for version in (1, 2):
        announce(bench, version, ONE)
    bench.step(JobDropped(JOB, force=True))
    register(bench, TWO)
    bench.attach()
    bench.offered(
        offer("g0", policy_version=2, job=JOB), offer("g1"), offer("g2", policy_version=3)
    )
    assert [bench.row(name).healthy for name in ("g0", "g1", "g2")] == [True, True, False]
    bench.step(VersionAnnounced(JOB, 3, 3, "http://t", TWO))
    assert not any(bench.row(name).healthy for name in ("g0", "g1"))


def test_operators_see_whose_job_it_is() -> None:
    bench = begun()
    for version in (1, 2):
        announce(bench, version, ONE)
    bench.at(104.0)
    [job] = bench.core.status(bench.now_s).jobs
    assert (job.run.holder, job.run.live, job.run.silent_s) == (ONE.holder, True, 4.0)
    assert (job.chain, job.first_version, job.base, job.latest_version) == (2, 1, False, 2)
    bench.step(RunEnded(JOB, ONE))
    [job] = bench.core.status(bench.now_s).jobs
    assert (job.run.live, job.run.ended) == (False, True)


def test_a_standing_job_without_a_trainer_has_dedicated_replicas_and_no_guest() -> None:
    bench = CoreBench(standing=(JobRecord(JOB, 1),))
    bench.attach()
    offers = offer("g0"), offer("d0", kind=ReplicaKind.DEDICATED)
    bench.offered(*offers)
    rows = {name: bench.row(name) for name in ("g0", "d0")}
    assert (rows["d0"].leased, rows["d0"].healthy, rows["g0"].leased) == (True, True, False)
    register(bench, ONE)
    bench.at(102.0).offered(*offers)
    assert bench.row("g0").leased
    bench.step(JobEnded(JOB))
    assert (bench.row("d0").leased, bench.row("g0").leased) == (True, False)
    [job] = bench.core.status(bench.now_s).jobs
    assert job.standing


def test_a_standing_job_keeps_its_replicas_without_turns_and_is_served_at_each_leaders_start() -> (
    None
):
    standing = (JobRecord(JOB, 1, "m"),)
    first = CoreBench(standing=standing)
    first.step(Demanded("gw", ()))
    register(first, ONE)
    first.step(JobEnded(JOB))
    for bench in (first, CoreBench(store=first.store, standing=standing)):
        bench.step(Demanded("gw", ()))
        bench.attach()
        bench.offered(offer("d0", kind=ReplicaKind.DEDICATED, model="m"))
        assert (bench.row("d0").leased, bench.row("d0").healthy) == (True, True)
        [job] = bench.core.status(bench.now_s).jobs
        assert (job.standing, job.model) == (True, "m")
        assert [told.lease.model for told in bench.commands() if told.HasField("lease")] == ["m"]


def test_a_job_on_the_command_line_has_a_name_and_perhaps_a_model() -> None:
    assert [(job.job, job.model) for job in standing_jobs(["a", "b=m=1"])] == [
        ("a", ""),
        ("b", "m=1"),
    ]
    for named, said in (
        (["a="], "model of --job a"),
        (["=m"], "give a name"),
        (["a", "a=m"], "twice"),
    ):
        with pytest.raises(ConfigError, match=said):
            standing_jobs(named)


# ---- demand ----


NONE = JobFigures("")
# Work for more turns than the replicas here have places.
MUCH = JobFigures("", 200, 1e5, 400.0)


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
    bench = bench_with()
    bench.offered(offer("g0"), offer("g1"))
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
    player.play(900.0, lambda s: MUCH if s % (work_s + pause_s) < work_s else NONE)
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


def test_a_report_is_read_as_it_is_sent_and_says_whose_it_is() -> None:
    job = pb.JobDemand(job="j", turns=2, owed_tokens=3.5, made_tok_s=1.5)
    switch = pb.Switch(replica="g0", epoch=4, took_s=2.25)
    event = demanded(pb.DemandReport(gateway="gw", jobs=[job], switches=[switch]))
    assert event == Demanded("gw", (JobFigures("j", 2, 3.5, 1.5),), (Switched("g0", 4, 2.25),))
    with pytest.raises(ConfigError, match="name"):
        demanded(pb.DemandReport())
