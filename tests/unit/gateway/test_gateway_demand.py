"""A gateway tells what its turns need, and the scheduler leases for it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from gateway_cases import serving, until
from scheduler_cases import GUEST, RunningScheduler, gateway_of, offering
from wire_cases import VLLM, ask, vllm_body

from rose.gateway import demand
from rose.gateway.demand import JOBS_KEPT, DemandMeter, DemandReporter
from rose.gateway.stats import LeaseLatencyClock
from rose.process import background_tasks
from rose.process.background_tasks import TaskDiedError
from rose.rpc import rose_pb2 as pb
from tests.fakes.memory_store import InMemoryStore
from tests.fakes.replica import StandInReplica
from tests.harness.waiting import PATIENCE_S


async def test_the_first_turn_brings_the_lease_that_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No report comes by itself: only the first turn can have brought the lease.
    monkeypatch.setattr(demand, "PERIOD_S", 60.0)
    async with (
        RunningScheduler(tmp_path, InMemoryStore()) as scheduler,
        StandInReplica() as replica,
        gateway_of(scheduler) as (gateway, session),
    ):
        await scheduler.until_job(demand_known=True, turns=0)
        async with offering(scheduler, replica):
            await until(lambda: bool(gateway.status().live_turns))
            await asyncio.sleep(0.3)
            assert not (await scheduler.snapshot()).leases
            assert gateway.status().usable == 0
            status, answer, _ = await ask(session, VLLM, vllm_body(4))
            assert status == 200
            assert answer["segments"][0]["replica"] == GUEST
            assert len((await scheduler.snapshot()).leases) == 1


async def test_a_new_scheduler_hears_of_demand_as_soon_as_it_is_found(tmp_path: Path) -> None:
    first = RunningScheduler(tmp_path, InMemoryStore())
    async with (
        StandInReplica(delay_s=0.02) as replica,
        gateway_of(first) as (_, session),
    ):
        async with first:
            await first.until_job(demand_known=True, turns=0)
        async with RunningScheduler(tmp_path, first.store, first.port) as again:
            await again.until_job(demand_known=True, turns=0)
            async with offering(again, replica):
                turn = asyncio.create_task(ask(session, VLLM, vllm_body(100)))
                await again.until_job(turns=1)
                assert 0 < (await again.job()).owed_tokens <= 100
                assert (await turn)[0] == 200
                await again.until_job(turns=0)


async def test_a_new_gateway_reports_under_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "PERIOD_S", 0.1)
    async with (
        RunningScheduler(tmp_path, InMemoryStore()) as scheduler,
        StandInReplica(delay_s=0.02) as replica,
        offering(scheduler, replica),
    ):
        names: set[str] = set()
        for life in (1, 2):
            async with (
                gateway_of(scheduler) as (_, session),
            ):
                turn = asyncio.create_task(ask(session, VLLM, vllm_body(60)))
                # The first one's last report lives on for a few seconds beside the second.
                await scheduler.until_job(turns=1)
                assert (await turn)[0] == 200
                await scheduler.until_job(turns=0)
                names.update(scheduler.core.demand.gateways)
                assert len(names) == life


async def test_a_report_counts_running_and_waiting_turns_and_expected_tokens() -> None:
    async with serving(StandInReplica(delay_s=0.01), row={"max_sequences": 2}) as (
        _,
        gateway,
        session,
    ):
        meter = DemandMeter(gateway.dispatcher, "gw", 0.0)
        assert meter.report(1.0) == pb.DemandReport(gateway="gw")
        turns = [asyncio.create_task(ask(session, VLLM, vllm_body(50))) for _ in range(5)]
        await until(lambda: gateway.status().waiting == 3)
        [job] = meter.report(2.0).jobs
        assert (job.job, job.turns) == ("", 5)
        assert 150 < job.owed_tokens <= 250
        await until(lambda: (gateway.dispatcher.made_tokens or {}).get("", 0) >= 60)
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
        turn = asyncio.create_task(ask(session, VLLM, vllm_body(400)))
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


class Refusing:
    """A scheduler's stub whose calls fail with a code."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code
        self.calls = 0

    async def ReportDemand(self, report: pb.DemandReport, timeout: float) -> pb.DemandReply:
        self.calls += 1
        raise grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), grpc.aio.Metadata())


@pytest.fixture
def work_began() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def reporter(work_began: asyncio.Event) -> DemandReporter:
    dispatcher: Any = SimpleNamespace(owed=lambda: iter(()), switches=LeaseLatencyClock())
    meter = DemandMeter(dispatcher, "gw", 0.0)
    return DemandReporter(meter, work_began, lambda: 1.0)


async def test_reports_that_fail_are_not_repeated_in_haste(
    reporter: DemandReporter, work_began: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "PERIOD_S", 0.1)
    stub: Any = Refusing(grpc.StatusCode.UNAVAILABLE)
    task = asyncio.create_task(reporter.run(stub))
    for _ in range(50):
        work_began.set()
        await asyncio.sleep(0.005)
    assert not task.done()
    task.cancel()
    assert 2 <= stub.calls <= 8


async def test_a_report_that_cannot_be_made_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_tasks, "FIRST_PAUSE_S", 0.001)
    async with (
        RunningScheduler(tmp_path, InMemoryStore()) as scheduler,
        gateway_of(scheduler) as (gateway, _),
    ):
        await scheduler.until_job(demand_known=True)
        gateway.dispatcher.switches = None  # type: ignore[assignment]
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TaskDiedError, match=r"^table ended \(AttributeError"):
                await gateway.failed()
