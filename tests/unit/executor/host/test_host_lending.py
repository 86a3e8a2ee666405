"""A lending host over vLLM's own scheduler: it schedules what stock vLLM does, whatever is lent."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kv_cases import NARROW, WIDE, HostRig, host_of, host_rig, prompt_of, undisturbed
from vllm.v1.request import RequestStatus

import executor.host.kv_lender
import executor.vllm.host.scheduler
from executor.errors import PageReleaseError

__all__ = ["host_of"]
Rigs = Callable[..., HostRig]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calm comes at once: a turn of these tests takes no time."""
    limits = executor.vllm.host.scheduler.lending_limits
    monkeypatch.setattr(
        executor.vllm.host.scheduler,
        "lending_limits",
        lambda settings: replace(limits(settings), calm_ns=0),
    )


@pytest.mark.parametrize("spec", [WIDE, NARROW], ids=["wide blocks", "narrow blocks"])
def test_an_idle_host_lends_all_but_its_reserve_and_says_what_is_gone(
    host_of: Rigs, spec: Any
) -> None:
    rig = host_of(blocks=161, spec=spec)
    whole = rig.resident
    assert rig.scheduler.has_requests(), "a host that was just started has memory to lend"
    rig.run_until_idle()
    state = rig.published
    reserve = -(-state.granules_total // 5)
    # Granule 0 is never lent, nor is a last one that is shorter.
    assert state.granules_lent in (
        state.granules_total - reserve,
        state.granules_total - reserve - 1,
    )
    assert state.bytes_lent == whole - rig.resident
    lent = state.granules_lent * rig.balloon.granule_bytes
    assert 0.95 * lent < state.bytes_lent <= lent
    assert rig.held_resident == 0
    assert state.idle
    assert state.kv_used == 0, "lent blocks count as free"
    assert state.reserve_missing == 0
    pool = rig.blocks
    assert (pool.get_usage(), pool.get_num_free_blocks()) == (0, 160)
    assert not rig.scheduler.has_requests()


def test_one_call_lends_a_bounded_part(host_of: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.host.kv_lender, "MOST_BYTES_A_CALL", 4 << 20)
    rig = host_of()
    lent = []
    while rig.scheduler.has_requests():
        rig.turn()
        lent.append(rig.published.bytes_lent)
    assert max(b - a for a, b in zip([0, *lent], lent, strict=False)) <= 4 << 20
    assert len(lent) > 5


def test_a_request_takes_back_what_it_will_need_before_it_is_scheduled(host_of: Rigs) -> None:
    rig = host_of()
    rig.run_until_idle()
    before = rig.published
    rig.add("small", prompt_of(0, 20), 4)
    assert rig.published.granules_lent == before.granules_lent, "the reserve serves it"
    rig.add("large", prompt_of(1, 400), 40)
    taken = rig.published
    assert before.granules_lent - taken.granules_lent >= 400 // 16
    rig.run_until_idle()
    for name, seed, prompt, count in (("small", 0, 20, 4), ("large", 1, 400, 40)):
        expected = undisturbed(prompt_of(seed, prompt), count)
        assert rig.outputs[name] == expected


def test_an_allocation_beyond_everything_mapped_succeeds_at_once(host_of: Rigs) -> None:
    rig = host_of()
    rig.run_until_idle()
    pool = rig.blocks
    held = len(rig.balloon.held)
    mapped = pool.get_num_free_blocks() - held
    blocks = pool.get_new_blocks(mapped + 5)
    assert len({block.block_id for block in blocks}) == mapped + 5
    assert len(rig.balloon.held) == held - 5
    rest = pool.get_new_blocks(pool.get_num_free_blocks())
    assert not rig.balloon.held
    pool.free_blocks(blocks + rest)
    assert pool.get_num_free_blocks() == 64


class Twins:
    """The same requests to a lending host and to stock vLLM, turn by turn."""

    def __init__(self, lending: HostRig, stock: HostRig) -> None:
        self.both = (lending, stock)
        self.lent: list[int] = []

    def add(self, name: str, prompt: list[int], count: int) -> None:
        for rig in self.both:
            rig.add(name, prompt, count)

    def turn(self) -> None:
        scheduled = []
        for rig in self.both:
            before = set(rig.scheduler.requests)
            rig.turn()
            latest = rig.in_flight[-1] if rig.in_flight else None
            tokens = dict(latest.num_scheduled_tokens) if latest is not None else {}
            scheduled.append((before, tokens, dict(rig.outputs), dict(rig.ends)))
        assert scheduled[0] == scheduled[1]
        lending = self.both[0]
        self.lent.append(lending.published.granules_lent)
        if not lending.in_flight:
            assert lending.held_resident == 0


@pytest.mark.parametrize("depth", [1, 2], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.usefixtures("clock")
def test_it_schedules_and_generates_step_by_step_what_stock_vllm_does(
    tmp_path: Path, host_of: Rigs, monkeypatch: pytest.MonkeyPatch, seed: int, depth: int
) -> None:
    rng = random.Random(seed)
    shape = {
        "blocks": rng.choice([65, 97, 129]),
        "spec": rng.choice([WIDE, NARROW]),
        "depth": depth,
        "caching": False,
    }
    (tmp_path / "stock").mkdir()
    stock = host_rig(tmp_path / "stock", monkeypatch, level="stock", **shape)
    lending = host_of(**shape)
    lending.run_until_idle()
    twins = Twins(lending, stock)
    twins.lent.append(lending.published.granules_lent)
    prompts: dict[str, tuple[list[int], int]] = {}
    for _ in range(500):
        act = rng.random()
        if act < 0.08 and len(prompts) < 40:
            for _ in range(rng.choice([1, 1, 6])):
                name = f"r{len(prompts)}"
                prompts[name] = (prompt_of(rng, rng.randint(1, 220)), rng.randint(1, 120))
                twins.add(name, *prompts[name])
        elif act < 0.1 and prompts:
            victim = rng.choice(sorted(prompts))
            for rig in twins.both:
                rig.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        elif act < 0.15:
            # The lending host goes on alone: empty steps are what it lends in.
            if not lending.in_flight and not stock.scheduler.has_requests():
                lending.run_until_idle()
                twins.lent.append(lending.published.granules_lent)
        else:
            twins.turn()
    for rig in twins.both:
        rig.run_until_idle()
    twins.lent.append(lending.published.granules_lent)
    assert lending.outputs == stock.outputs
    for name, (prompt, count) in prompts.items():
        assert lending.outputs[name] == undisturbed(prompt, count)[: len(lending.outputs[name])]
    moves = [after - before for before, after in pairwise(twins.lent)]
    assert min(moves) < 0 < max(moves), "memory went out and came back"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("clock")
def test_prefixes_stay_right_when_their_granules_neighbours_are_lent(
    host_of: Rigs, seed: int
) -> None:
    rng = random.Random(seed)
    rig = host_of(blocks=129, spec=rng.choice([WIDE, NARROW]))
    shared = prompt_of(rng, 90)
    prompts: dict[str, tuple[list[int], int]] = {}
    for number in range(30):
        prompt = (shared if rng.random() < 0.6 else []) + prompt_of(rng, rng.randint(1, 90))
        prompts[f"r{number}"] = (prompt, rng.randint(1, 60))
        rig.add(f"r{number}", *prompts[f"r{number}"])
        if rng.random() < 0.4:
            rig.run_until_idle()
        for _ in range(rng.randint(0, 20)):
            rig.turn()
    rig.run_until_idle()
    assert rig.scheduler.reset_prefix_cache()
    for name, (prompt, count) in prompts.items():
        assert rig.outputs[name] == undisturbed(prompt, count)


def test_a_prefix_cache_does_not_hold_memory_for_good_after_the_load_fell(
    host_of: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' known pain: what was cached in the rush hour stays resident all night."""
    monkeypatch.setenv("ROSE_HOST_PREFIX_COLD_S", "60")
    rig = host_of(blocks=129)
    now_ns = 10**12
    rig.lender.clock_ns = lambda: now_ns
    rng = random.Random(3)
    warm = prompt_of(rng, 64)
    rig.add("first", [*warm, *prompt_of(rng, 20)], 4)
    rig.run_until_idle()
    for number in range(12):
        rig.add(f"rush-{number}", prompt_of(rng, 120), 8)
    rig.run_until_idle()
    held = rig.resident
    after_rush = rig.published.granules_lent
    now_ns += 50 * 10**9
    rig.add("warm", [*warm, 1], 1)
    rig.run_until_idle()
    assert rig.published.granules_lent == after_rush, "what may be asked for again is kept"
    now_ns += 20 * 10**9
    # One small request an hour is load enough: an engine without any runs no scheduler.
    rig.add("night", prompt_of(rng, 8), 1)
    rig.run_until_idle()
    state = rig.published
    assert state.granules_lent >= 0.6 * state.granules_total > after_rush
    assert rig.resident < 0.5 * held
    manager = rig.scheduler.kv_cache_manager
    rig.add("again", [*warm, 2], 1)
    request = rig.scheduler.requests["again"]
    assert manager.get_computed_blocks(request)[1] == len(warm), "a prefix in use is kept"


def broken(*_: object) -> None:
    raise PageReleaseError("the kernel says no")


@pytest.mark.parametrize("call", ["release", "restore"])
def test_whatever_goes_wrong_is_said_in_one_line_and_the_host_has_its_whole_pool(
    host_of: Rigs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    rig = host_of()
    stock_queue = type(rig.blocks.free_block_queue)
    prompts = {f"r{n}": prompt_of(n, 100) for n in range(8)}
    if call == "restore":
        rig.run_until_idle()
    monkeypatch.setattr(rig.balloon.pages, call, broken)
    rig.turn()
    for name, prompt in prompts.items():
        rig.add(name, prompt, 60)
    rig.run_until_idle()
    assert {name: undisturbed(prompt, 60) for name, prompt in prompts.items()} == rig.outputs
    pool = rig.blocks
    assert (pool.get_num_free_blocks(), rig.lender) == (64, None)
    assert type(pool.free_block_queue) is not stock_queue, "vLLM's own queue is back"
    state = rig.published
    assert (state.granules_lent, state.bytes_lent, state.granules_total) == (0, 0, 0)
    lines = [record for record in caplog.records if record.name == "vllm.rose.host"]
    assert [record.getMessage() for record in lines] == [
        "KV memory is not lent; the host serves on with its whole pool: the kernel says no"
    ]
    assert lines[0].exc_info is None


def test_a_failure_inside_an_allocation_is_no_failure_of_the_allocation(
    host_of: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = host_of()
    rig.run_until_idle()
    monkeypatch.setattr(rig.balloon.pages, "restore", broken)
    pool = rig.blocks
    blocks = pool.get_new_blocks(60)
    assert len(set(map(id, blocks))) == 60
    rig.scheduler.schedule()
    assert rig.lender is None
    assert pool.get_num_free_blocks() == 4
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 64


def test_a_host_that_is_no_longer_published_lends_no_more(
    host_of: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = host_of()
    rig.run_until_idle()
    monkeypatch.setattr(rig.scheduler.observer, "_publish", broken)
    rig.add("served", prompt_of(0, 50), 30)
    rig.run_until_idle()
    assert (rig.scheduler.observer, rig.lender) == (None, None)
    state = rig.published
    assert not state.idle, "or its guest would run beside it for good"
    assert (state.bytes_lent, state.granules_lent, state.heartbeat_ns) == (0, 0, 0)
    assert rig.outputs["served"] == undisturbed(prompt_of(0, 50), 30)


def test_observing_touches_neither_pool_nor_memory(host_of: Rigs) -> None:
    rig = host_of(level="observe")
    whole = rig.resident
    stock = host_of(level="stock")
    pools = [r.blocks.free_block_queue for r in (rig, stock)]
    assert type(pools[0]) is type(pools[1])
    assert not rig.scheduler.has_requests()
    rig.add("one", prompt_of(0, 50), 30)
    rig.run_until_idle()
    assert rig.published.granules_total == 0
    assert rig.resident == whole


def test_a_connector_that_may_read_free_blocks_forbids_lending(
    host_of: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = host_of(level="observe")
    rig.scheduler.shutdown()
    monkeypatch.setenv("ROSE_HOST_LEVEL", "lend")
    rig.scheduler.connector = object()
    rig.scheduler.attach()
    assert rig.scheduler.observer is not None
    assert rig.lender is None
