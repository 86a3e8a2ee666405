"""Wherever a commit breaks off: no token is delivered under a version that was not proven."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import rose.replica.engine_update as weights_module
from executor import ControlPage
from tests.fakes.asgi_client import SECRET, AsgiExchange, settle
from tests.fakes.weight_ranks import NEXT, FakeWeightRanks, Served
from tests.harness.seated_host import SeatedHost, granted
from tests.harness.waiting import PATIENCE_S

TURN = {"request_id": "r", "token_ids": [1], "sampling": {"max_tokens": 80}}
APPLY = {"manifests": ["/w/manifests/3.json"], "chunks": "/w/chunks"}
# Place and kind of each failure, and whether the replica may serve on.
SERVES_ON = [
    ("", ""),
    ("decode", "raises"),
    ("load", "raises"),
    ("pause", "raises"),
    ("pause", "silent"),
    ("pause", "hangs"),
    ("settle", "raises"),
]
IN_DOUBT = [
    ("commit", "raises"),
    ("commit", "half"),
    ("commit", "silent"),
    ("commit", "hangs"),
    ("commit", "unproven"),
    ("commit", "other_version"),
    ("commit", "no_report"),
    ("stamp", "raises"),
    ("stamp", "silent"),
    ("stamp", "hangs"),
    ("resume", "raises"),
    ("resume", "silent"),
    ("resume", "hangs"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_ROLE", "dedicated")
    monkeypatch.setenv("ROSE_REPLICA_SECRET", SECRET)
    monkeypatch.setenv("ROSE_WEIGHTS_DIR", "/w")
    monkeypatch.setenv("ROSE_UNSIGNED", "1")
    monkeypatch.setattr(weights_module, "CALL_LIMIT_S", 0.05)


async def until_longer(turn: AsgiExchange) -> None:
    """A turn goes on: what has come of it becomes more."""
    before = len(turn.lines)
    for _ in range(10_000):
        if len(turn.lines) > before:
            return
        await asyncio.sleep(0.001)
    pytest.fail("no token came")


@asynccontextmanager
async def serving(engine: FakeWeightRanks) -> AsyncIterator[tuple[Served, AsgiExchange]]:
    """A replica with a turn that runs; its engine steps whenever it is not paused."""
    served = await Served(engine).start()
    await settle()
    assert (await served.ask("admit", {"epoch": 1}))[0] == 200
    turn = served.begin("generate", TURN)
    await settle()

    async def steps() -> None:
        while True:
            engine.step_unpaused()
            await asyncio.sleep(0.001)

    running = asyncio.create_task(steps())
    await until_longer(turn)
    yield served, turn
    running.cancel()
    turn.leave()
    await turn.done()


def check_stamps(engine: FakeWeightRanks, turn: AsgiExchange) -> set[int]:
    """Versions of a turn's tokens: each is what all ranks held, and was proven."""
    versions = set()
    for line in turn.lines:
        for token in line.get("token_ids", []):
            assert engine.sampled[token] == [line["version"]] * len(engine.weights)
            assert line["version"] in engine.proven
            versions.add(line["version"])
    return versions


@pytest.mark.parametrize(("where", "how"), IN_DOUBT)
async def test_a_commit_that_breaks_off_ends_all_turns_and_closes_the_replica(
    where: str, how: str
) -> None:
    engine = FakeWeightRanks(where, how)
    async with serving(engine) as (served, turn):
        status, answer = await served.ask("weights/apply", APPLY)
        await turn.done()
        assert turn.lines[-1] == {"finish_reason": "revoked"}, "it goes on elsewhere"
        assert len(turn.lines) > 1, "what it had is delivered"
        check_stamps(engine, turn)
        assert status == 422
        assert (answer["error"]["type"], answer["digest_ok"]) == ("unproven", False)
        assert answer["version"] is None, "nobody knows"
        if where != "resume":
            assert "resume" not in engine.calls
        state = await served.state()
        assert (state["admitting"], state["proven"]) == (False, False)
        assert (await served.ask("generate", TURN))[0] == 503
        assert (await served.ask("admit", {"epoch": 2}))[0] == 409
        calls = len(engine.calls)
        again = await served.ask("weights/apply", APPLY)
        assert (again[0], again[1]["error"]["type"]) == (422, "unproven")
        assert len(engine.calls) == calls, "only a new life of the engine helps"


@pytest.mark.parametrize(("where", "how"), SERVES_ON)
async def test_what_breaks_off_around_a_commit_lets_turns_go_on_under_what_is_proven(
    where: str, how: str
) -> None:
    engine = FakeWeightRanks(where, how)
    async with serving(engine) as (served, turn):
        status, answer = await served.ask("weights/apply", APPLY)
        applied = where in {"", "settle"}
        assert status == (200 if applied else 422)
        if not applied:
            assert answer["error"]["type"] == "bad_version"
        await until_longer(turn)
        assert check_stamps(engine, turn) == ({0, NEXT} if applied else {0})
        state = await served.state()
        assert (state["admitting"], state["proven"]) == (True, True)
        assert state["policy_version"] == (NEXT if applied else 0)


@pytest.mark.parametrize("busy_from", ["the start", "the switch"])
async def test_a_busy_host_gets_no_update_beside_it_and_an_idle_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy_from: str
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    monkeypatch.setattr(weights_module, "STAGE_PATIENCE_S", 0.02)
    monkeypatch.setattr(weights_module, "SWITCH_PATIENCE_S", 0.02)
    page = ControlPage.create(tmp_path / "page")
    host = SeatedHost(granted(page))
    host.tell(running=int(busy_from == "the start"))
    engine = FakeWeightRanks()
    staged = FakeWeightRanks._call

    async def call(self: FakeWeightRanks, name: str, action: Any) -> None:
        await staged(self, name, action)
        if name == "load":
            host.tell(running=1)

    monkeypatch.setattr(FakeWeightRanks, "_call", call)
    async with serving(engine) as (served, turn):
        status, answer = await served.ask("weights/apply", APPLY)
        assert (status, answer["error"]["type"]) == (503, "host_busy")
        assert ("load" in engine.calls) == (busy_from == "the switch")
        assert "pause" not in engine.calls
        await until_longer(turn)
        monkeypatch.setattr(FakeWeightRanks, "_call", staged)
        host.tell()
        granted(page)
        assert (await served.ask("weights/apply", APPLY))[0] == 200
        await until_longer(turn)
        assert check_stamps(engine, turn) == {0, NEXT}


@pytest.mark.parametrize("where", ["load", "pause", "commit", "stamp", "resume"])
async def test_a_caller_that_hangs_up_does_not_break_a_commit_off(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "CALL_LIMIT_S", 5.0)
    engine = FakeWeightRanks(where, "hangs")
    go_on = asyncio.Event()

    async def call(self: FakeWeightRanks, name: str, action: Any) -> None:
        self.calls.append(name)
        if name == where:
            self.broke.set()
            await go_on.wait()
        action()

    monkeypatch.setattr(FakeWeightRanks, "_call", call)
    async with serving(engine) as (served, turn):
        caller = served.begin("weights/apply", APPLY)
        await asyncio.wait_for(engine.broke.wait(), PATIENCE_S)
        caller.task.cancel()
        await asyncio.gather(caller.task, return_exceptions=True)
        go_on.set()
        await asyncio.sleep(0.02)
        assert (await served.state())["policy_version"] == NEXT
        assert check_stamps(engine, turn) == {0, NEXT}


async def test_a_process_that_ends_in_a_commit_delivers_nothing_more() -> None:
    engine = FakeWeightRanks("commit", "hangs")
    async with serving(engine) as (served, turn):
        before = asyncio.all_tasks()
        caller = served.begin("weights/apply", APPLY)
        await asyncio.wait_for(engine.broke.wait(), PATIENCE_S)
        for task in asyncio.all_tasks() - before:
            task.cancel()
        await asyncio.gather(caller.task, return_exceptions=True)
        await turn.done()
        assert turn.lines[-1] == {"finish_reason": "revoked"}
        check_stamps(engine, turn)
        assert not (await served.state())["proven"]


@pytest.mark.parametrize(
    ("report", "proven"),
    [({}, True), ({"version": 1}, False), ({"digest_ok": False}, False), ({"probe_ok": 0}, False)],
    ids=str,
)
def test_ranks_that_report_another_version_have_proven_nothing(
    report: dict[str, object], proven: bool
) -> None:
    whole = {"version": 2, "digest_ok": True, "probe_ok": True, "probe_max_abs_diff": 0.0}
    if proven:
        weights_module._insist_proven(whole | report, 2)
        return
    with pytest.raises(weights_module.ActivationError, match="ranks report version"):
        weights_module._insist_proven(whole | report, 2)
