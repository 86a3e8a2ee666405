"""Several jobs on one scheduler: their versions, health and names are never taken for another's."""

import pytest
from core_cases import JOB, CoreBench, offer

from elastic_scheduler import Offer
from rose.errors import RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import JobFigures
from rose.scheduler.core.messages import (
    Demanded,
    JobEnded,
    JobRegistered,
    ReplicaDrained,
    VersionAnnounced,
)
from rose.scheduler.wire import asked, event_of


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
