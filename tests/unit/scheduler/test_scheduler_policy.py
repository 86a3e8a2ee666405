"""Leases follow a policy, turns follow health, and both give reasons."""

import pytest
from core_cases import JOB, CoreBench, offer

from elastic_scheduler import HarvestMode, ReplicaKind, make_policy
from rose.errors import ConfigError
from rose.main.scheduler import settings_of
from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.messages import LogRecord, Offered, TakenBack
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import load


def bench_with(policy: str) -> CoreBench:
    bench = CoreBench()
    times = LeaseTimes(5.0, 1.0, 1.0)
    bench.core = SchedulerCore(load(()), HarvestMode.ACTIVE, times, make_policy(policy))
    bench.with_job()
    bench.attach()
    return bench


def test_fixed_leases_dedicated_replicas_only() -> None:
    bench = bench_with("fixed")
    bench.offered(offer("g0"), offer("d0", kind=ReplicaKind.DEDICATED))
    assert [lease.replica for lease in bench.core.status(100.0).leases] == ["d0"]


def test_a_revocation_slows_the_growth_of_guests() -> None:
    bench = bench_with("rose")
    offers = tuple(offer(f"g{number}") for number in range(4))
    bench.offered(*offers)
    bench.step(TakenBack(1, "g0", 1, "pressure"))
    bench.step(TakenBack(1, "g1", 1, "pressure"))
    held_at = {}
    for now_s in (102.0, 106.0, 111.0):
        bench.now_s = now_s
        bench.step(Offered(1, offers))
        held_at[now_s] = len(bench.core.status(now_s).leases)
    assert held_at == {102.0: 2, 106.0: 3, 111.0: 4}


def test_leases_and_revocations_say_why() -> None:
    bench = bench_with("rose")
    bench.offered()
    [lease] = bench.core.status(100.0).leases
    assert (lease.job, lease.why) == (JOB, "saves more than the switch costs")
    granted = [a for a in bench.actions if isinstance(a, LogRecord) and a.event == "lease_granted"]
    assert granted[0].fields["why"] == lease.why


def test_a_replica_back_from_a_long_silence_gets_turns_under_its_new_lease_only() -> None:
    bench = bench_with("rose")
    bench.offered(offer(epoch=1))
    assert bench.row().healthy
    bench.now_s = 110.0
    # The process was stopped: it still believes in the lease of epoch 2.
    bench.step(Offered(1, (offer(epoch=2),)))
    assert "health_changed" in bench.records()
    assert bench.row().leased
    assert bench.row().lease_epoch == 3
    assert not bench.row().healthy
    bench.step(Offered(1, (offer(epoch=3),)))
    assert bench.row().healthy


def test_a_silence_that_its_offers_outlived_changes_nothing() -> None:
    bench = bench_with("rose")
    bench.offered(offer(epoch=0, ttl_s=9.0))
    bench.at(104.0)
    bench.at(107.9)
    bench.step(Offered(1, (offer(epoch=1, ttl_s=9.0),)))
    assert (bench.row().healthy, bench.row().lease_epoch) == (True, 1)


def test_a_node_that_attaches_anew_is_believed_anew() -> None:
    bench = bench_with("rose")
    bench.offered(offer(epoch=5))
    bench.attach(stream=2)
    bench.step(Offered(2, (offer(epoch=0),)))
    assert bench.row().healthy


def test_the_policy_is_chosen_at_the_start(tmp_path: object) -> None:
    argv = ["--store", f"{tmp_path}/s", "--log-dir", f"{tmp_path}"]
    assert settings_of(argv).policy == "rose"
    assert settings_of([*argv, "--policy", "spot"]).policy == "spot"
    with pytest.raises(Exception, match="did you mean 'spot'"):
        settings_of([*argv, "--policy", "spott"])


def test_how_long_a_guest_stays_with_a_job_is_chosen_for_the_policy_that_holds_it(
    tmp_path: object,
) -> None:
    argv = ["--store", f"{tmp_path}/s", "--log-dir", f"{tmp_path}"]
    assert settings_of([*argv, "--hold-s", "20"]).hold_s == 20
    for options in (["--policy", "spot", "--hold-s", "20"], ["--hold-s", "0"], ["--hold-s", "nan"]):
        with pytest.raises(ConfigError, match="--hold-s"):
            settings_of([*argv, *options])
