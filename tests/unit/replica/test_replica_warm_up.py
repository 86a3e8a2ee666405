"""A replica is warm once it has run steps of every size, within a bound; nothing of it stays."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from executor import ControlPage, GuestState
from executor.engine_settings import WARM_UP
from rose.replica.control import GuestControl
from rose.replica.engine import WarmUpSizes
from rose.replica.vllm import VllmEngine
from rose.replica.warm_up import WarmUp
from tests.fakes.async_llm import FakeAsyncLLM
from tests.harness.waiting import PATIENCE_S


class WarmUpRig:
    def __init__(self) -> None:
        self.engine = FakeAsyncLLM()
        self.now_s = 0.0
        self.warm_up = WarmUp(VllmEngine(self.engine), GuestControl(), clock_s=lambda: self.now_s)
        self.warm_up.start()

    async def run(self, steps: int) -> None:
        """Until it ends, or for so many steps of the engine."""
        for number in range(steps):
            await asyncio.sleep(0)
            if self.engine.live:
                self.engine.step(FinishReason.LENGTH if number % 3 == 2 else None)
            await asyncio.sleep(0.001)
            if self.warm_up.warm or self.warm_up.failed:
                return


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("ROSE_ROLE", "dedicated")
    monkeypatch.setenv("ROSE_WARM_UP_S", "30")
    return monkeypatch


@pytest.fixture
def page(asked: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ControlPage]:
    with ControlPage.create(tmp_path / "page") as page:
        asked.setenv("ROSE_ROLE", "guest")
        asked.setenv("ROSE_CONTROL_PAGE", str(page.path))
        yield page


def test_the_sizes_reach_what_a_lease_may_ask_for() -> None:
    batches = list(WarmUpSizes(6, 100, max_tokens=64, vocabulary=96).batches())
    assert sorted({sequences for sequences, _ in batches}) == [1, 2, 4, 6]
    assert (1, 64) in batches
    assert all(sequences * prompt <= 64 for sequences, prompt in batches)


async def test_without_being_asked_a_replica_is_warm_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROSE_WARM_UP_S", raising=False)
    rig = WarmUpRig()
    await rig.run(5)
    assert rig.warm_up.warm
    assert rig.engine.prompts == []


@pytest.mark.usefixtures("asked")
async def test_a_warm_up_runs_every_size_and_leaves_nothing() -> None:
    rig = WarmUpRig()
    rig.engine.resets_after = 2
    await rig.run(2_000)
    assert rig.warm_up.warm, rig.warm_up.said
    expected = sum(n for n, _ in VllmEngine(rig.engine).sizes.batches())
    assert len(rig.engine.prompts) == expected
    assert {p.temperature for p in rig.engine.parameters} == {0.0, 1.0}
    assert rig.engine.resets == 2, "asked again until no prefix is left"
    assert rig.engine.live == 0


@pytest.mark.usefixtures("asked")
async def test_a_warm_up_that_takes_too_long_ends_and_says_so_in_one_line() -> None:
    rig = WarmUpRig()
    async with asyncio.timeout(PATIENCE_S):
        while not rig.warm_up.failed:
            rig.now_s += 2.0
            await asyncio.sleep(0.005)
    assert not rig.warm_up.warm
    assert "longer than 30 s" in rig.warm_up.said
    assert "\n" not in rig.warm_up.said
    assert rig.engine.live == 0, "its turns are gone from the engine"


async def test_time_that_the_gate_holds_back_is_not_counted(page: ControlPage) -> None:
    rig = WarmUpRig()
    await asyncio.sleep(0.01)
    rig.now_s = 1_000.0
    page.guest.write(GuestState(yielded_ns=995 * 10**9))
    await rig.run(2_000)
    assert rig.warm_up.warm, rig.warm_up.said
    assert "5.0 s of its own" in rig.warm_up.said


def test_the_tokens_of_a_warm_up_are_nobodys() -> None:
    pytest.importorskip("vllm.v1.core.sched.async_scheduler")
    from executor.vllm.guest.scheduler import _rollout_tokens

    class Output:
        req_ids = (f"{WARM_UP}0-abc", "turn-1", f"{WARM_UP}1-abc")
        sampled_token_ids = ([1], [2, 3], [4])

    assert _rollout_tokens(Output()) == 2
