"""The version chain reaches every node, and a replica that missed it gets no turns."""

import pytest
from core_cases import JOB, CoreBench, offer

from rose.errors import ConfigError, RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.messages import JobRegistered, VersionAnnounced
from rose.scheduler.persistence import load
from rose.scheduler.wire import asked, event_of, offer_of
from tests.fakes.memory_store import InMemoryStore


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
