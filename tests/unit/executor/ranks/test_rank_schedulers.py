"""vLLM's own schedulers over two ranks: with one step in flight, two, and two of a pipeline."""

import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kv_cases import (
    GuestRig,
    StandInRunner,
    engine_of,
    guest_of,
    host_of,
    kv_views,
    prompt_of,
    undisturbed,
)
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from executor.kv.backing import HostPages, Range, resident_bytes
from executor.kv.rank_pages import RankPager, RankPages
from executor.vllm.cpu_worker import CpuKvWorker
from executor.vllm.guest import scheduler as guest_module
from executor.vllm.host import kv_lender as host_module
from executor.vllm.kv_backing import kv_pages
from executor.vllm.rank_worker import OPERATIONS

__all__ = ["guest_of", "host_of"]
Rigs = Callable[..., GuestRig]
BLOCKS, TOKENS = 65, 40


class SchedulerRanks:
    """Both ranks' memory, pagers and runners; a step runs on both, and they agree."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gc.collect()  # Reports of an earlier test, in this process, are not to be found.
        self.pagers: list[RankPager] = []
        self.memory: list[torch.Tensor] = []
        self.runners: list[StandInRunner] = []
        for module in (guest_module, host_module):
            monkeypatch.setattr(module, "kv_pages", self.pages_of)

    def pages_of(self, vllm: Any, config: Any, backend: str = "auto") -> tuple[RankPages, Any]:
        """Stand in for kv_pages in an engine core whose workers are elsewhere."""
        views = kv_views(config, self.allocate)
        self.runners.append(StandInRunner(views))
        for rank, engine in enumerate((vllm, engine_of(views))):
            pages, granules = kv_pages(engine, config, backend)
            self.pagers.append(RankPager(pages, granules, rank, 2))
        pages = RankPages.of_processes([os.getpid()], 2, config.num_blocks)
        return pages, pages.granules

    def allocate(self, size: int) -> torch.Tensor:
        self.memory.append(torch.zeros(size, dtype=torch.int8).fill_(1))
        return self.memory[-1]

    def attach(self, rig: GuestRig, *, asynchronous: bool) -> GuestRig:
        self.runners.insert(0, rig.runner)
        self.memory.insert(0, rig.buffers[0])
        rig.runner = self  # type: ignore[assignment]
        rig.scheduler.scheduler_config.async_scheduling = asynchronous
        return rig

    def execute(self, output: Any) -> ModelRunnerOutput:
        for pager in self.pagers:
            pager.carry_out(getattr(output, OPERATIONS, ()))
        first, second = (runner.execute(output) for runner in self.runners)
        assert first.sampled_token_ids == second.sampled_token_ids
        return first

    @property
    def resident(self) -> list[int]:
        starts = [(memory.data_ptr(), memory.nbytes) for memory in self.memory]
        return [resident_bytes(Range(at, at + size).whole_pages()) for at, size in starts]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulerRanks]:
    made = SchedulerRanks(monkeypatch)
    yield made
    assert all(isinstance(pager.pages, HostPages) for pager in made.pagers)


flights = pytest.mark.parametrize(
    ("depth", "asynchronous"),
    [(1, False), (2, True), (2, False)],
    ids=["one step", "asynchronous", "pipeline"],
)


def insist_undisturbed(rig: GuestRig, prompts: Sequence[list[int]]) -> None:
    for number, prompt in enumerate(prompts):
        name = f"r{number}"
        expected = undisturbed(prompt, TOKENS)
        got = rig.outputs[name]
        assert got == expected[: len(got)]
        assert rig.ends[name] == "abort" or got == expected


@flights
def test_a_guest_gives_back_on_both_ranks_and_computes_the_same(
    guest_of: Rigs, ranks: SchedulerRanks, depth: int, asynchronous: bool
) -> None:
    rig = ranks.attach(guest_of(blocks=BLOCKS, depth=depth), asynchronous=asynchronous)
    whole, rng = ranks.resident, random.Random(depth)
    prompts = [prompt_of(rng, rng.randint(20, 120)) for _ in range(24)]
    for number, prompt in enumerate(prompts):
        rig.add(f"r{number}", prompt, TOKENS)
        for _ in range(rng.randint(1, 12)):
            rig.allow(kv_granule_cap=rng.choice([0, 0, 8, 16, 40]))
            rig.turn()
    rig.allow(kv_granule_cap=0)
    rig.run_until_idle()
    insist_undisturbed(rig, prompts)
    rig.allow(kv_granule_cap=4)
    rig.run_until_idle()
    state = rig.published
    assert state.granules_mapped == 4
    returned = rig.kv_bytes - state.bytes_mapped
    assert returned > 0.9 * rig.kv_bytes
    for was, now in zip(whole, ranks.resident, strict=True):
        assert was - now >= returned


@flights
def test_a_host_lends_on_both_ranks_and_computes_the_same(
    host_of: Rigs, ranks: SchedulerRanks, depth: int, asynchronous: bool
) -> None:
    rig: Any = ranks.attach(
        host_of(blocks=BLOCKS, depth=depth, caching=False), asynchronous=asynchronous
    )
    rng, prompts, most = random.Random(depth), [], 0
    for burst in range(6):
        for _ in range(12 if burst % 2 else 2):
            prompts.append(prompt_of(rng, rng.randint(20, 200)))
            rig.add(f"r{len(prompts) - 1}", prompts[-1], TOKENS)
            rig.turns(rng.randint(0, 3))
        rig.run_until_idle()
        lent = rig.published
        most = max(most, lent.granules_lent)
        assert lent.bytes_lent > 0
        assert all(was <= rig.kv_bytes - lent.bytes_lent for was in ranks.resident)
    insist_undisturbed(rig, prompts)
    assert most > BLOCKS // 2
    assert not rig.ends or set(rig.ends.values()) == {"length"}


def test_a_cpu_rank_sleeps_until_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_broadcast, "SpinCondition", shm_broadcast.SpinCondition)
    monkeypatch.setattr(CPUWorker, "init_device", lambda _: None)
    object.__new__(CpuKvWorker).init_device()
    steps = shm_broadcast.MessageQueue(1, 1)
    rank = shm_broadcast.MessageQueue.create_from_handle(steps.export_handle(), 0)
    with ThreadPoolExecutor(2) as threads:
        ready = threads.submit(rank.wait_until_ready)
        steps.wait_until_ready()
        ready.result()
        for step in range(4):
            waiting = threads.submit(rank.dequeue)
            began_s = time.process_time()
            time.sleep(0.2)
            spent_s = time.process_time() - began_s
            if step == 3:  # vLLM's notice of a step may be lost; it looks again after 5 s.
                monkeypatch.setattr(shm_broadcast.SpinCondition, "notify", lambda _: None)
            steps.enqueue(step)
            assert waiting.result(timeout=2) == step
            assert spent_s < 0.05
