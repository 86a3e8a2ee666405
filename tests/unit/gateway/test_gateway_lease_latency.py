"""The counted time from a lease to a replica's first token, and the time that does not count."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gateway_cases import until
from scheduler_cases import GUEST, RunningScheduler, gateway_of, offering
from wire_cases import VLLM, ask, vllm_body

from elastic_scheduler import ReplicaKind
from rose.gateway import ReplicaEntry
from rose.gateway.stats import LeaseLatency, LeaseLatencyClock
from tests.fakes.memory_store import InMemoryStore
from tests.fakes.replica import StandInReplica

FREE = ReplicaEntry("g", ReplicaKind.GUEST, "http://g", False, 0, True, 0, 8)
OTHER = replace(FREE, id="d", kind=ReplicaKind.DEDICATED, leased=True, lease_epoch=1)


def leased(epoch: int = 1, healthy: bool = True) -> ReplicaEntry:
    return replace(FREE, leased=True, lease_epoch=epoch, healthy=healthy)


@pytest.fixture
def clock() -> LeaseLatencyClock:
    clock = LeaseLatencyClock()
    clock.set_table([FREE, OTHER], 0.0)
    return clock


def test_a_turn_that_waits_for_the_lease_counts_from_the_lease_on(clock: LeaseLatencyClock) -> None:
    assert not clock.awaiting
    clock.set_table([leased(), OTHER], 10.0)
    clock.tried("g", 10.0)
    assert clock.awaiting
    clock.token("g", 1, 12.5)
    assert clock.measured == [LeaseLatency("g", 1, 2.5)]
    assert not clock.awaiting
    clock.token("g", 1, 13.0)
    clock.set_table([leased(), OTHER], 14.0)
    assert clock.measured == [LeaseLatency("g", 1, 2.5)]


def test_catching_up_counts_and_waiting_for_a_turn_does_not(clock: LeaseLatencyClock) -> None:
    clock.set_table([leased(healthy=False), OTHER], 10.0)
    clock.set_table([leased(healthy=True), OTHER], 14.0)
    clock.tried("g", 60.0)
    clock.token("g", 1, 61.0)
    assert clock.measured == [LeaseLatency("g", 1, 5.0)]


def test_refusals_and_rests_count_and_turns_that_went_elsewhere_do_not(
    clock: LeaseLatencyClock,
) -> None:
    clock.set_table([leased(), OTHER], 10.0)
    for refused_s in (10.0, 10.5, 11.0):
        clock.tried("g", refused_s)
        clock.ended("g", 1, refused_s + 0.25)
    clock.tried("g", 41.25)
    clock.token("g", 1, 42.0)
    assert clock.measured == [LeaseLatency("g", 1, 2.0)]


def test_a_long_attempt_is_no_gap(clock: LeaseLatencyClock) -> None:
    clock.set_table([leased(), OTHER], 10.0)
    clock.tried("g", 10.0)
    clock.tried("g", 30.0)
    clock.ended("g", 1, 31.0)
    clock.tried("g", 40.0)
    clock.token("g", 1, 50.0)
    assert clock.measured == [LeaseLatency("g", 1, 40.0)]


def test_nobody_knows_the_age_of_leases_in_the_first_table() -> None:
    clock = LeaseLatencyClock()
    clock.set_table([leased(), OTHER], 0.0)
    assert not clock.awaiting
    # The table ran out in a silence; what was leased meanwhile is as unknown.
    clock.set_table([], 5.0)
    clock.set_table([leased(2), OTHER], 9.0)
    assert not clock.awaiting
    clock.set_table([leased(3), OTHER], 10.0)
    assert clock.awaiting


def test_a_lease_that_ends_without_a_token_is_not_measured(clock: LeaseLatencyClock) -> None:
    clock.set_table([leased(1), OTHER], 10.0)
    clock.tried("g", 10.0)
    clock.set_table([leased(2), OTHER], 11.0)
    clock.ended("g", 1, 11.0)
    clock.token("g", 1, 11.5)
    assert clock.measured == []
    clock.tried("g", 12.0)
    clock.token("g", 2, 13.0)
    assert clock.measured == [LeaseLatency("g", 2, 1.0)]
    clock.told("g", 1)
    assert clock.measured
    clock.told("g", 2)
    assert clock.measured == []
    clock.set_table([FREE, OTHER], 14.0)
    assert not clock.awaiting


async def test_the_scheduler_hears_how_long_a_lease_took_to_its_first_token(
    tmp_path: Path,
) -> None:
    async with (
        RunningScheduler(tmp_path, InMemoryStore()) as scheduler,
        StandInReplica(delay_s=0.2) as replica,
        gateway_of(scheduler) as (gateway, session),
    ):
        await scheduler.until_job(demand_known=True)
        async with offering(scheduler, replica):
            await until(lambda: bool(gateway.status().live_turns))
            assert (await ask(session, VLLM, vllm_body(10)))[0] == 200
            await until(lambda: not gateway.dispatcher.switches.measured)
    lines = (tmp_path / "events-scheduler.jsonl").read_text().splitlines()
    [told] = [each for each in map(json.loads, lines) if each["event"] == "first_token"]
    assert (told["replica"], told["epoch"]) == (GUEST, 1)
    assert told["took_s"] >= 0.2
