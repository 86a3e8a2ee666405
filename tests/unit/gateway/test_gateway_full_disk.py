"""A log disk that is full, and background tasks that die: turns go on, and `/health` says so."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from rose.errors import RoseError
from rose.gateway import Gateway, GatewaySettings
from rose.gateway.replicas.dispatcher import Dispatcher
from rose.gateway.turns.hedging import Hedging
from rose.process import background_tasks
from tests.fakes.replica import StandInReplica
from tests.harness.processes import Forked
from tests.harness.waiting import PATIENCE_S
from tests.unit.gateway.gateway_cases import base_url, entry, failing_over, serving, until
from tests.unit.gateway.hedged_cases import COUNT, hedged_case
from tests.unit.gateway.wire_cases import VLLM, ask, get, tokens_of, vllm_body

FULL = Path("/dev/full")


@pytest.fixture
def full_logs(tmp_path: Path) -> Path:
    (tmp_path / "events-gateway.jsonl").symlink_to(FULL)
    return tmp_path


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_tasks, "FIRST_PAUSE_S", 0.001)


async def test_a_turn_goes_on_elsewhere_though_its_events_cannot_be_written(
    full_logs: Path,
) -> None:
    dying = StandInReplica(delay_s=0.01)
    dying.break_after = 3
    async with failing_over(dying, log_dir=full_logs) as (_, _, gateway, session):
        bodies = [vllm_body(8, request_id=f"r{n}") for n in range(4)]
        answers = await asyncio.gather(*(ask(session, VLLM, body) for body in bodies))
        assert [status for status, _, _ in answers] == [200] * 4
        assert all(tokens_of(answer) == [*range(101, 109)] for _, answer, _ in answers)
        assert len(dying.requests) > 0
        await asyncio.to_thread(gateway.flush_logs)
        said, exposed = await get(session, "/health"), await get(session, "/metrics")
    assert said["status"] == "degraded"
    assert said["troubles"] == ["log events-gateway.jsonl: No space left on device"]
    assert said["log_dropped"] > 0
    assert f"rose_gateway_log_dropped_total {said['log_dropped']}" in exposed


async def test_a_lease_may_change_though_it_cannot_be_written(full_logs: Path) -> None:
    async with serving(log_dir=full_logs) as (replica, gateway, session):
        gateway.set_table(())
        gateway.set_table((entry(replica, "guest-0", lease_epoch=2),))
        status, _, _ = await ask(session, VLLM, vllm_body(2))
    assert status == 200


async def test_a_sweep_that_breaks_once_is_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, broke = Dispatcher.sweep, []

    def once(self: Dispatcher) -> None:
        if not broke:
            broke.append(True)
            raise OSError(28, "No space left on device")
        sweep(self)

    monkeypatch.setattr(Dispatcher, "sweep", once)
    async with serving(name="ded-0", version_wait_s=0.05) as (_, _, session):
        async with asyncio.timeout(PATIENCE_S):
            status, _, _ = await ask(session, VLLM, vllm_body(2, min_version=5))
        assert status in (409, 503)
        said = await get(session, "/health")
    assert said["status"] == "degraded"
    assert said["troubles"][0].startswith("task sweep was started again: OSError: [Errno 28]")


async def test_turns_that_cannot_be_judged_hold_up_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One waiting turn breaks the sweep each time: it is ended, the next one gets its answer."""
    reachable = Dispatcher._hopeless

    def breaks(self: Dispatcher, waiter: Any, now_s: float) -> Any:
        if waiter.need.exact_version == 4:
            raise KeyError("a fault of the program")
        return reachable(self, waiter, now_s)

    monkeypatch.setattr(Dispatcher, "_hopeless", breaks)
    async with serving(name="ded-0", version_wait_s=0.05) as (_, _, session):
        async with asyncio.timeout(PATIENCE_S):
            bad, good = await asyncio.gather(
                ask(session, VLLM, vllm_body(2, exact_version=4)),
                ask(session, VLLM, vllm_body(2, min_version=5)),
            )
        said = await get(session, "/health")
    assert bad[0] == 500
    assert good[0] in (409, 503)
    assert said["status"] == "ok", "the sweep itself never broke"


async def test_a_group_whose_copies_cannot_be_judged_holds_up_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[str] = []

    def breaks(self: Hedging, group: Any) -> None:
        judged.append("")
        raise KeyError("a fault of the program")

    monkeypatch.setattr(Hedging, "_consider", breaks)
    async with hedged_case(version_wait_s=0.05) as case:
        slow = await case.begun()
        await until(lambda: bool(judged))
        async with asyncio.timeout(PATIENCE_S):
            other = await ask(case.http, VLLM, vllm_body(2, min_version=5))
        status, answer, _ = await slow
    assert (status, tokens_of(answer)) == (200, COUNT)
    assert other[0] in (409, 503)
    assert len(judged) == 1, "it is left alone from then on"


async def test_a_source_that_dies_is_asked_again_and_nothing_counts_as_leased_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lives: list[int] = []

    async def run(sink: Any) -> None:
        lives.append(len(lives))
        if len(lives) == 1:
            raise RuntimeError("a fault of the program")
        sink((row,), ())
        await asyncio.Event().wait()

    monkeypatch.setattr(Gateway, "_source", lambda self: SimpleNamespace(run=run))
    async with StandInReplica() as replica:
        row = entry(replica, "ded-0")
        async with (
            Gateway(GatewaySettings(port=0, scheduler="127.0.0.1:1")) as gateway,
            aiohttp.ClientSession(base_url(gateway)) as session,
        ):
            await until(lambda: len(lives) == 2)
            status, _, _ = await ask(session, VLLM, vllm_body(2))
            said = await get(session, "/health")
    assert status == 200
    assert said["troubles"][0].startswith("task table was started again: RuntimeError")


async def test_a_source_that_never_lives_ends_the_gateway_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(sink: Any) -> None:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr(Gateway, "_source", lambda self: SimpleNamespace(run=run))
    async with (
        Gateway(GatewaySettings(port=0, scheduler="127.0.0.1:1")) as gateway,
        asyncio.timeout(PATIENCE_S),
    ):
        with pytest.raises(RoseError, match=r"^table ended .*start the process again$"):
            await gateway.failed()


async def test_a_gateway_process_whose_logs_are_full_serves(full_logs: Path) -> None:
    async with StandInReplica(delay_s=0.01) as dying, StandInReplica() as living:
        dying.break_after = 3
        options = ["--port", "0", "--log-dir", str(full_logs)]
        for name, replica in (("ded-0", dying), ("ded-1", living)):
            options += ["--replica", f"{name}=dedicated={replica.url}"]
        with Forked("-m", "rose.main.gateway", *options, stdout=True, stderr=FULL) as process:
            url = (await process.line()).split()[-1]
            async with aiohttp.ClientSession(url) as session:
                async with asyncio.timeout(PATIENCE_S):
                    while (await get(session, "/health"))["replicas"] < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                turns = [
                    ask(session, VLLM, vllm_body(8, request_id=f"r{n}", token_ids=[1, 10 * n]))
                    for n in range(6)
                ]
                answers = await asyncio.gather(*turns)
                said = await get(session, "/health")
            process.terminate()
            code = await asyncio.to_thread(process.wait, PATIENCE_S)
    assert [status for status, _, _ in answers] == [200] * 6
    assert json.dumps(said["troubles"]).count("No space left on device") == 1
    assert code == 0
