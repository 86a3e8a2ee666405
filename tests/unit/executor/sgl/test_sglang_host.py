"""State and loans of an SGLang host, with stand-ins for SGLang's objects."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import executor.sglang.host.plugin
from executor import ControlPage, HostState
from executor.errors import ExecutorError
from executor.sglang.compat import HOST_NEEDED, check_features
from executor.sglang.host.plugin import HostHooks, LatencyHook, SglangHost
from executor.sglang.host.state_publisher import BatchPublisher
from tests.fakes.sglang_scheduler import (
    StandInBatch,
    StandInPool,
    StandInRequest,
    StandInScheduler,
)

MS = 1_000_000


class SglangHostRig:
    """A publisher whose clock stands still, and turns of SGLang's loop."""

    def __init__(self, page: ControlPage) -> None:
        self.page = page
        self.now_ns = 1_000 * MS
        self.scheduler = StandInScheduler()
        self.observer = BatchPublisher(
            self.scheduler, page.take_host(), (0.5, 0.15), lambda: self.now_ns
        )
        self.observer.publish()

    @property
    def told(self) -> HostState:
        state = self.page.host.read()
        assert state is not None
        return state

    @property
    def state(self) -> HostState:
        """State that the next step would publish."""
        self.observer.publish()
        return self.told

    def add(self, *ids: str) -> list[StandInRequest]:
        requests = [StandInRequest(id_) for id_ in ids]
        for request in requests:
            self.scheduler.waiting_queue.append(request)
            self.observer.arrived(request, again=False)
        return requests

    def prefill(self, *requests: StandInRequest, tokens: int = 10, last: bool = True) -> None:
        batch = StandInBatch(list(requests), [tokens] * len(requests))
        queue = self.scheduler.waiting_queue
        self.scheduler.waiting_queue = [each for each in queue if each not in requests]
        self.scheduler.chunked_req = None if last else requests[-1]
        self.observer.began(batch, self.now_ns)
        self.now_ns += 20 * MS
        if last:
            for request in requests:
                request.output_ids.append(7)
            self.scheduler.running_batch.reqs += requests
        self.observer.stepped(batch)

    def decode(self, *ending: StandInRequest) -> None:
        requests = list(self.scheduler.running_batch.reqs)
        batch = StandInBatch(requests)
        self.observer.began(batch, self.now_ns)
        self.now_ns += 10 * MS
        for request in ending:
            request.finished_reason = "length"
        self.observer.stepped(batch)
        self.scheduler.running_batch.reqs = [each for each in requests if each not in ending]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SglangHostRig]:
    with ControlPage.create(tmp_path / "page") as page:
        yield SglangHostRig(page)


def test_a_request_is_told_when_it_comes_when_it_runs_and_when_it_ends(rig: SglangHostRig) -> None:
    assert rig.state.idle
    (request,) = rig.add("a")
    assert (rig.told.waiting, rig.told.running) == (1, 0)
    assert rig.told.queued_prefill_tokens == 10
    assert rig.told.earliest_prefill_deadline_ns == 1_500 * MS
    rig.prefill(request)
    assert rig.told.in_step
    assert rig.told.earliest_prefill_deadline_ns == 1_500 * MS
    rig.decode()
    assert (rig.told.waiting, rig.told.running, rig.told.step_seq) == (0, 1, 2)
    assert rig.told.earliest_prefill_deadline_ns == 0
    assert rig.told.earliest_decode_deadline_ns == 1_170 * MS
    rig.decode(request)
    assert not rig.told.idle, "SGLang has not said so"
    rig.observer.idled()
    assert rig.told.idle
    assert rig.told.busy_ns == 40 * MS


def test_who_waits_for_a_prefill_keeps_the_deadline_of_its_last_token(rig: SglangHostRig) -> None:
    first, second = rig.add("a", "b")
    rig.prefill(first)
    rig.decode()
    due_ns = rig.state.earliest_decode_deadline_ns
    rig.prefill(second)
    assert rig.state.earliest_decode_deadline_ns == due_ns
    rig.decode()
    assert rig.state.earliest_decode_deadline_ns == rig.now_ns + 150 * MS


def test_chunks_of_a_prompt_leave_the_queue_one_by_one(rig: SglangHostRig) -> None:
    (request,) = rig.add("a")
    rig.prefill(request, tokens=4, last=False)
    assert (rig.state.running, rig.state.queued_prefill_tokens) == (1, 6)
    rig.prefill(request, tokens=6)
    assert rig.state.queued_prefill_tokens == 0


def test_one_that_is_put_back_waits_from_its_last_token_on(rig: SglangHostRig) -> None:
    first, second = rig.add("a", "b")
    rig.prefill(first, second)
    rig.decode()
    rig.scheduler.running_batch.reqs.remove(second)
    rig.scheduler.waiting_queue.append(second)
    rig.observer.arrived(second, again=True)
    rig.decode()
    rig.decode()
    assert (rig.state.running, rig.state.waiting) == (1, 1)
    assert rig.state.earliest_decode_deadline_ns == rig.now_ns - 20 * MS + 150 * MS
    rig.prefill(second)
    assert (rig.state.running, rig.state.waiting) == (2, 0)


def test_who_is_aborted_in_the_queue_is_waited_for_no_more(rig: SglangHostRig) -> None:
    rig.add("a", "b")
    del rig.scheduler.waiting_queue[0]
    rig.observer.aborted()
    assert rig.state.waiting == 1
    rig.scheduler.waiting_queue.clear()
    rig.observer.idled()
    assert rig.state.idle


def test_of_overlapped_steps_the_host_is_busy_until_the_last_was_processed(
    rig: SglangHostRig,
) -> None:
    """One begins before the one before it is processed, and has requests that ended meanwhile."""
    (request,) = rig.add("a")
    rig.scheduler.waiting_queue.clear()
    rig.scheduler.running_batch.reqs.append(request)
    prefill = StandInBatch([request], [10])
    decode, overshoot = StandInBatch([request]), StandInBatch([request])
    rig.observer.began(prefill, rig.now_ns)
    rig.observer.began(decode, rig.now_ns)
    rig.now_ns += 20 * MS
    request.output_ids.append(7)
    rig.observer.stepped(prefill)
    assert (rig.state.in_step, rig.state.running, rig.state.queued_prefill_tokens) == (True, 1, 0)
    assert rig.state.earliest_decode_deadline_ns == rig.now_ns + 150 * MS
    rig.observer.began(overshoot, rig.now_ns)
    rig.now_ns += 10 * MS
    request.finished_reason = "length"
    rig.observer.stepped(decode)
    assert (rig.state.in_step, rig.state.running) == (True, 0)
    rig.scheduler.running_batch.reqs.clear()
    rig.now_ns += 10 * MS
    rig.observer.stepped(overshoot)
    rig.observer.idled()
    assert (rig.told.idle, rig.told.busy_ns) == (True, 40 * MS)


def test_what_sglang_alone_knows_of_keeps_the_host_busy(rig: SglangHostRig) -> None:
    (request,) = rig.add("a")
    rig.prefill(request)
    rig.scheduler.stalled = True
    rig.decode(request)
    rig.observer.idled()
    assert not rig.state.idle
    rig.scheduler.stalled = False
    rig.observer.idled()
    assert rig.state.idle


def test_kv_that_only_prefixes_hold_is_not_in_use(rig: SglangHostRig) -> None:
    allocator = rig.scheduler.token_to_kv_pool_allocator
    rig.scheduler.tree_cache.keep(allocator.alloc(30))
    allocator.alloc(20)
    rig.observer.publish()
    assert (rig.state.kv_used, rig.state.kv_total) == (20, 100)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's environment; SGLang is not here, so nothing asks for its version."""
    path = tmp_path / "page"
    for name, value in {"ROSE_ROLE": "host", "ROSE_CONTROL_PAGE": str(path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(executor.sglang.host.plugin, "check_version", lambda _: None)
    return path


REFUSED = {
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "dllm_algorithm": "LowConfidence",
    "pp_size": 2,
    "dp_size": 2,
    "enable_pdmux": True,
}


@pytest.mark.parametrize("option", REFUSED)
def test_a_feature_that_breaks_a_promise_is_one_line_and_guests_stay_away(
    environ: Path, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    assert REFUSED.keys() == HOST_NEEDED.keys()
    with ControlPage.create(environ) as page:
        host = SglangHost(StandInScheduler(**{option: REFUSED[option]}))
        host.attach()
        assert host.observer is None
        assert page.host_view().vetoed
        host.leave()
    said = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1
    assert said[0].endswith(f"leave out --{option.replace('_', '-')}")


def test_an_ordinary_server_is_no_reason_to_refuse() -> None:
    check_features(StandInScheduler(disaggregation_mode="null", pp_size=1).server_args, HOST_NEEDED)


def hooked(host: SglangHost | None) -> HostHooks:
    hooks = HostHooks(lends=False)
    hooks._host = host
    return hooks


@pytest.mark.parametrize("attached", [False, True])
def test_each_hook_returns_what_sglang_does(environ: Path, *, attached: bool) -> None:
    scheduler = StandInScheduler()
    host = SglangHost(scheduler) if attached else None
    if host is not None:
        host.attach()
    request = StandInRequest("a", output_ids=[7])
    batch = StandInBatch([request], [10])
    calls: dict[str, tuple[Any, ...]] = {
        "_add_request_to_queue": (request,),
        "get_next_batch_to_run": (),
        "run_batch": (batch,),
        "process_batch_result": (batch, "result"),
        "abort_request": ("abort",),
        "on_idle": (),
        "maybe_sleep_on_idle": (),
        "run_event_loop": (),
    }
    hooks = {name.rpartition(".")[2]: hook for name, hook in hooked(host).hooks.items()}
    assert hooks.keys() - calls.keys() == {"__init__"}
    for name, args in calls.items():
        seen = []

        def original(*given: Any, name: str = name, seen: list[Any] = seen) -> str:
            seen.append(given)
            return name

        assert hooks[name](original, scheduler, *args) == name
        assert seen == [(scheduler, *args)]


def test_a_host_that_breaks_gives_up_once_and_serves_on(
    environ: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = StandInScheduler()
    host = SglangHost(scheduler)
    host.attach()

    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(host.observer, "stepped", broken)
    for _ in range(3):
        host.done(StandInBatch([]))
    with ControlPage.open(environ) as page:
        state = page.host.read()
        assert state is not None
        assert not state.idle
        assert page.host_view().vetoed
    assert caplog.text.count("it serves on without ROSE") == 1
    host.leave()


class Lending:
    """A host that lends from host memory of 64 granules, and hooks in the allocator's place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # A quarter of a MiB for 64 tokens of one layer's keys, and as much for values.
        self.keys, self.values = (torch.ones(64 * 64 + 1, 1, 1024) for _ in range(2))
        cache = StandInPool(keys=[self.keys], values=[self.values])
        self.scheduler = StandInScheduler(64 * 64, cache)
        self.allocator = self.scheduler.token_to_kv_pool_allocator
        for name, module in self.scheduler.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setenv("ROSE_HOST_LEVEL", "lend")
        monkeypatch.setenv("ROSE_HOST_PREFIX_COLD_S", "0")
        self.host = SglangHost(self.scheduler)
        self.host.attach()
        self.hooks = HostHooks(lends=True)
        self.hooks._host = self.host
        assert self.host.pool is not None
        self.pool = self.host.pool

    def idle(self) -> None:
        for _ in range(64):
            self.host.idled()

    def alloc(self, tokens: int) -> torch.Tensor | None:
        kind = type(self.allocator)
        return self.hooks.allocate(kind.alloc, self.allocator, tokens)

    @property
    def available(self) -> int:
        return self.hooks.available(type(self.allocator).available_size, self.allocator)


@pytest.fixture
def lending(environ: Path, monkeypatch: pytest.MonkeyPatch) -> Lending:
    return Lending(monkeypatch)


def test_what_is_lent_is_gone_from_memory_and_still_free_to_sglang(lending: Lending) -> None:
    lending.idle()
    lent = lending.host.lender
    assert lent is not None
    assert lent.lent.granules_lent == 64 - lent.reserve
    assert lent.lent.bytes_lent > 20 << 20
    assert lending.available == 64 * 64, "SGLang's own books do not change"
    assert lending.allocator.available_size() < 64 * 20


def test_an_allocation_takes_lent_memory_back_by_itself(lending: Lending) -> None:
    lending.idle()
    held = len(lending.pool.held)
    found = lending.alloc(64 * 30)
    assert found is not None
    assert len(set(found.tolist())) == 64 * 30
    assert len(lending.pool.held) < held
    rest = lending.alloc(64 * 34)
    assert rest is not None
    assert not lending.pool.held
    assert len({*found.tolist(), *rest.tolist()}) == 64 * 64
    assert lending.alloc(1) is None, "there is no more than there was"


def test_cold_prefixes_are_forgotten_and_lent(lending: Lending) -> None:
    for slots in torch.split(lending.alloc(64 * 40), 64):
        lending.scheduler.tree_cache.keep(slots)
    lending.idle()
    assert lending.host.lender is not None
    assert lending.host.lender.lent.granules_lent == 64 - lending.host.lender.reserve


def test_a_prefix_that_was_asked_for_lately_stays(lending: Lending) -> None:
    pool, tree = lending.pool, lending.scheduler.tree_cache
    for slots in torch.split(lending.alloc(64 * 8), 64):
        tree.keep(slots)
    second = 10**9
    pool.warm.add(100 * second, 64 * 6)
    assert pool.forget(110 * second, 20 * second, 4) > 0
    assert tree.evictable_size() == 64 * 6
    assert pool.forget(110 * second, 20 * second, 4) == 0
    assert pool.forget(121 * second, 20 * second, 4) > 0


def test_an_allocator_that_begins_anew_lends_on(lending: Lending) -> None:
    lending.idle()
    held = set(lending.pool.held)
    lending.hooks.clear(type(lending.allocator).clear, lending.allocator)
    assert lending.pool.held == held
    assert lending.available == 64 * 64
    assert lending.allocator.available_size() == 64 * 64 - lending.pool.lent_blocks


def test_a_host_that_lends_no_more_has_the_stock_pool(lending: Lending) -> None:
    lending.idle()
    lending.host.stop_lending(ExecutorError("enough"))
    assert lending.host.lender is None
    assert lending.allocator.available_size() == 64 * 64
    assert not lending.allocator.need_sort


class Manager:
    """A tokenizer manager with one request."""

    def __init__(self) -> None:
        stats = SimpleNamespace(created_time=10.0, first_token_time=10.5, finished_time=12.5)
        self.rid_to_state = {"r1": SimpleNamespace(time_stats=stats)}

    async def handle(self, received: Any) -> str:
        self.rid_to_state.pop("r1", None)
        return "handled"


def test_latencies_of_a_finished_request_are_told(environ: Path) -> None:
    received = SimpleNamespace(
        rids=["r1", "r2", "HEALTH_CHECK_1"],
        finished_reasons=[{"type": "length"}, None, {"type": "length"}],
        prompt_tokens=[7, 8, 1],
        completion_tokens=[5, 2, 1],
    )
    hook = LatencyHook()
    assert asyncio.run(hook(Manager.handle, Manager(), received)) == "handled"
    with ControlPage.open(environ) as page:
        (record,) = page.latency.drain().records
    assert record.request_id == "r1"
    assert (record.ttft_ns, record.tpot_ns, record.e2e_ns) == (500 * MS, 500 * MS, 2_500 * MS)
    assert (record.prompt_tokens, record.output_tokens) == (7, 5)


def test_outputs_of_another_shape_are_handled_all_the_same(environ: Path) -> None:
    assert asyncio.run(LatencyHook()(Manager.handle, Manager(), object())) == "handled"
