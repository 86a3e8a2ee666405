"""A gateway tells what its turns need, and the scheduler leases for it."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
from scheduler_cases import GUEST, RunningScheduler, gateway_of, offering, watching

from elastic_scheduler import ReplicaKind
from rose.gateway import ReplicaEntry, demand
from rose.gateway.demand import JOBS_KEPT, DemandMeter, DemandReporter
from rose.gateway.stats import LeaseLatency, LeaseLatencyClock
from rose.process import background_tasks
from rose.process.background_tasks import TaskDiedError
from rose.rpc import rose_pb2 as pb
from tests.fakes.replica import StandInReplica
from tests.harness.waiting import PATIENCE_S
from tests.unit.gateway.gateway_cases import begin, serving, until
from tests.unit.gateway.wire_cases import VLLM, ask, vllm_body


async def test_the_first_turn_brings_the_lease_that_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No report comes by itself: only the first turn can have brought the lease.
    monkeypatch.setattr(demand, "PERIOD_S", 60.0)
    async with (
        StandInReplica() as replica,
        watching(tmp_path) as (scheduler, gateway, session),
        offering(scheduler, replica),
    ):
        await until(lambda: bool(gateway.status().live_turns))
        await asyncio.sleep(0.3)
        assert not (await scheduler.snapshot()).leases
        assert gateway.status().usable == 0
        status, answer, _ = await ask(session, VLLM, vllm_body(4))
        assert status == 200
        assert answer["segments"][0]["replica"] == GUEST
        assert len((await scheduler.snapshot()).leases) == 1


async def test_a_new_scheduler_hears_of_demand_as_soon_as_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "PERIOD_S", 0.1)
    first = RunningScheduler(tmp_path)
    async with (
        StandInReplica(delay_s=0.02) as replica,
        gateway_of(first) as (_, session),
    ):
        async with first:
            await first.until_job(demand_known=True, turns=0)
        async with RunningScheduler(tmp_path, first.store, first.port) as again:
            await again.until_job(demand_known=True, turns=0)
            async with offering(again, replica):
                turn = begin(session, vllm_body(40))
                await again.until_job(turns=1)
                assert 0 < (await again.job()).owed_tokens <= 40
                assert (await turn)[0] == 200
                await again.until_job(turns=0)


async def test_a_new_gateway_reports_under_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "PERIOD_S", 0.1)
    async with (
        RunningScheduler(tmp_path) as scheduler,
        StandInReplica(delay_s=0.02) as replica,
        offering(scheduler, replica),
    ):
        names: set[str] = set()
        for life in (1, 2):
            async with gateway_of(scheduler) as (_, session):
                turn = begin(session, vllm_body(30))
                # The first one's last report lives on for a few seconds beside the second.
                await scheduler.until_job(turns=1)
                assert (await turn)[0] == 200
                await scheduler.until_job(turns=0)
                names.update(scheduler.core.demand.gateways)
                assert len(names) == life


async def test_a_report_counts_running_and_waiting_turns_and_expected_tokens() -> None:
    replica = StandInReplica(delay_s=0.01)
    async with serving(replica, row={"max_sequences": 2}) as (_, gateway, session):
        meter = DemandMeter(gateway.dispatcher, "gw", 0.0)
        assert meter.report(1.0) == pb.DemandReport(gateway="gw")
        turns = [begin(session, vllm_body(25)) for _ in range(5)]
        await until(lambda: gateway.status().waiting == 3)
        [job] = meter.report(2.0).jobs
        assert (job.job, job.turns) == ("", 5)
        assert 75 < job.owed_tokens <= 125
        await until(lambda: (gateway.dispatcher.made_tokens or {}).get("", 0) >= 30)
        [later] = meter.report(3.0).jobs
        assert later.owed_tokens < job.owed_tokens
        assert later.made_tok_s > 5.0
        assert [status for status, _, _ in await asyncio.gather(*turns)] == [200] * 5
        assert not meter.report(4.0).jobs


async def test_once_turns_have_lengths_the_expected_ones_count_and_not_the_budgets() -> None:
    async with serving(row={"max_sequences": 64}) as (replica, gateway, session):
        replica.stop_after = 5
        for _ in range(40):
            assert (await ask(session, VLLM, vllm_body(400)))[0] == 200
        replica.hang_after = 0
        turn = begin(session, vllm_body(400))
        await until(lambda: any(gateway.status().live_turns.values()))
        [job] = DemandMeter(gateway.dispatcher, "gw", 0.0).report(1.0).jobs
        assert job.owed_tokens < 50
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)


async def test_a_flow_is_remembered_over_a_pause() -> None:
    dispatcher: Any = SimpleNamespace(turns=[("j", 3)], switches=LeaseLatencyClock())
    dispatcher.owed = lambda: iter(dispatcher.turns)
    meter = DemandMeter(dispatcher, "gw", 0.0)
    for second in range(1, 60):
        dispatcher.made_tokens["j"] += 100
        report = meter.report(float(second))
    assert report.jobs[0].made_tok_s == pytest.approx(100.0, rel=0.01)
    dispatcher.turns = []
    for second in range(60, 90):
        assert not meter.report(float(second)).jobs
    dispatcher.turns = [("j", 3)]
    assert meter.report(90.0).jobs[0].made_tok_s > 80.0


async def test_names_without_end_make_no_report_without_end() -> None:
    dispatcher: Any = SimpleNamespace(switches=LeaseLatencyClock())
    dispatcher.owed = lambda: ((f"job-{number % 5_000}", 2) for number in range(9_999))
    jobs = DemandMeter(dispatcher, "gw", 0.0).report(1.0).jobs
    assert len(jobs) <= JOBS_KEPT
    assert sum(job.turns for job in jobs) == 9_999
    assert sum(job.owed_tokens for job in jobs) == 2 * 9_999


async def test_reports_that_fail_are_not_repeated_in_haste(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demand, "PERIOD_S", 0.1)
    dispatcher: Any = SimpleNamespace(owed=lambda: iter(()), switches=LeaseLatencyClock())
    work_began, nothing = asyncio.Event(), grpc.aio.Metadata()
    refused = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing)
    stub: Any = SimpleNamespace(ReportDemand=AsyncMock(side_effect=refused))
    reporter = DemandReporter(DemandMeter(dispatcher, "gw", 0.0), work_began, lambda: 1.0)
    task = asyncio.create_task(reporter.run(stub))
    for _ in range(50):
        work_began.set()
        await asyncio.sleep(0.005)
    assert not task.done()
    task.cancel()
    assert 2 <= stub.ReportDemand.await_count <= 8


async def test_a_report_that_cannot_be_made_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_tasks, "FIRST_PAUSE_S", 0.001)
    async with watching(tmp_path) as (_, gateway, _):
        gateway.dispatcher.switches = None  # type: ignore[assignment]
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TaskDiedError, match=r"^table ended \(AttributeError"):
                await gateway.failed()


# ---- the time from a lease to its first token, and the time that does not count ----

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


@pytest.mark.parametrize(
    ("synced_s", "attempts_s", "token_s", "counted_s"),
    [
        # Catching up counts, and waiting for a turn does not.
        (14.0, [(60.0, None)], 61.0, 5.0),
        # Refusals and rests count, and turns that went elsewhere do not.
        (10.0, [(10.0, 10.25), (10.5, 10.75), (11.0, 11.25), (41.25, None)], 42.0, 2.0),
        # A long attempt is no gap.
        (10.0, [(10.0, None), (30.0, 31.0), (40.0, None)], 50.0, 40.0),
    ],
    ids=["catching up", "refusals", "long"],
)
def test_what_a_lease_takes_to_its_first_token_counts_and_pauses_do_not(
    clock: LeaseLatencyClock,
    synced_s: float,
    attempts_s: list[tuple[float, float | None]],
    token_s: float,
    counted_s: float,
) -> None:
    clock.set_table([leased(healthy=False), OTHER], 10.0)
    clock.set_table([leased(healthy=True), OTHER], synced_s)
    for tried_s, ended_s in attempts_s:
        clock.tried("g", tried_s)
        if ended_s is not None:
            clock.ended("g", 1, ended_s)
    clock.token("g", 1, token_s)
    assert clock.measured == [LeaseLatency("g", 1, counted_s)]


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
        StandInReplica(delay_s=0.2) as replica,
        watching(tmp_path) as (scheduler, gateway, session),
        offering(scheduler, replica),
    ):
        await until(lambda: bool(gateway.status().live_turns))
        assert (await ask(session, VLLM, vllm_body(3)))[0] == 200
        await until(lambda: not gateway.dispatcher.switches.measured)
    lines = (tmp_path / "events-scheduler.jsonl").read_text().splitlines()
    [told] = [each for each in map(json.loads, lines) if each["event"] == "first_token"]
    assert (told["replica"], told["epoch"]) == (GUEST, 1)
    assert told["took_s"] >= 0.2
