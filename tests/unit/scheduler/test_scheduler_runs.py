"""One trainer has a job at a time; the one that lost it is told by whom, across leaders too."""

import pytest
from core_cases import JOB, CoreBench, offer

from elastic_scheduler import ReplicaKind
from rose.errors import ConfigError, RefusedError, RunFencedError, RunHeldError
from rose.main.scheduler import standing_jobs
from rose.scheduler.core.messages import (
    Demanded,
    JobDropped,
    JobEnded,
    JobRegistered,
    RunEnded,
    RunRenewed,
    Tick,
    VersionAnnounced,
)
from rose.scheduler.core.runs import Claim
from rose.scheduler.persistence import JobRecord

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
