"""Ranks of an SGLang engine decide alike: the first decides, and all do the same to pool and pages.

Each rank is a thread with a scheduler of stand-ins; they meet where SGLang's ranks broadcast.
"""

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from sglang_gpu_cases import (
    ALL,
    GRANULES,
    PARTS,
    TOKENS,
    GpuMemory,
    device_cache,
    settings_of,
)
from sglang_gpu_cases import (
    SLOTS as GPU_SLOTS,
)

import executor.sglang.host.plugin as plugin_module
from executor import ControlPage, Grant, GrantMode
from executor.engine_settings import EngineSettings
from executor.errors import ExecutorError, RankError
from executor.kv.backing import HostPages, Range, resident_bytes
from executor.rank_group import RankGroup, wait_together
from executor.sglang.guest.plugin import GuestScheduler
from executor.sglang.host.plugin import HostHooks
from executor.sglang.ranks import rank_memory
from tests.fakes.cuda.driver import PAGE, StandInDevice
from tests.fakes.sglang_scheduler import StandInPool, StandInRequest, StandInScheduler
from tests.harness.seated_host import SeatedHost

MS = 1_000_000
SLOTS = 4095
RANKS = 2


class ThreadGroup:
    """Group of threads that meet to broadcast and to gather."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=20)
        self._values: list[Any] = [None] * RANKS

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class Threads:
    """Two ranks as threads; `all` calls a function with each rank's number at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = ThreadPoolExecutor(RANKS)
        self.group = ThreadGroup()
        monkeypatch.setattr(RankGroup, "agree", lambda r, v=None: r._group.gather(r.rank, v)[0])
        monkeypatch.setattr(RankGroup, "gather", lambda r, v: r._group.gather(r.rank, v))

    def all(self, act: Callable[[int], Any]) -> list[Any]:
        return list(self.pool.map(act, range(RANKS)))

    def tp_group(self, rank: int) -> Any:
        return SimpleNamespace(ranks=[4, 5], rank_in_group=rank, cpu_group=self.group)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    gc.collect()  # Reports of earlier ranks of this process end with their pagers.
    made = Threads(monkeypatch)
    yield made
    made.pool.shutdown()


def schedulers(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> list[StandInScheduler]:
    made = [StandInScheduler(SLOTS, StandInPool(SLOTS + 1, width=64)) for _ in range(RANKS)]
    for rank, scheduler in enumerate(made):
        scheduler.tp_group = threads.tp_group(rank)
    for name, module in made[0].modules(*made[1:]).items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


class RankedGuest:
    """A guest of two ranks beside an idle host; what is done to one scheduler is done to both."""

    def __init__(
        self, page: ControlPage, threads: Threads, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.page = page
        self.threads = threads
        self.schedulers = schedulers(threads, monkeypatch)
        settings = EngineSettings("guest", str(page.path), 0.0, 0.0, orphan_s=60.0)
        self.guests: list[GuestScheduler] = threads.all(
            lambda rank: GuestScheduler(self.schedulers[rank], settings)
        )
        self.host = SeatedHost(page, time.monotonic_ns)

    def grant(self, mode: GrantMode, tokens: int, cap: int) -> None:
        now_ns = time.monotonic_ns()
        self.host.tell()
        expiry_ns = now_ns + 2_000 * MS
        self.page.grant.write(
            Grant(
                mode,
                token_budget=tokens,
                max_sequences=8,
                kv_granule_cap=cap,
                expiry_ns=expiry_ns,
                heartbeat_ns=now_ns,
            )
        )

    def begin(self) -> bool:
        both = self.threads.all(
            lambda rank: self.guests[rank].begin(self.schedulers[rank].running_batch)
        )
        assert both[0] == both[1]
        self.check()
        return bool(both[0])

    def check(self) -> None:
        """Both ranks have the same books; what is held has no pages on either."""
        first, second = (self.books(rank) for rank in range(RANKS))
        assert first == second
        held = self.guests[0]._pool.held
        for guest in self.guests:
            assert guest._pager is not None
            pages = guest._pager.pages
            assert isinstance(pages, HostPages)
            if self.guests[0]._pool.unmapped:
                assert set(pages.released) == held
            assert guest._pager._report.failure == ""

    def books(self, rank: int) -> tuple[Any, ...]:
        guest, scheduler = self.guests[rank], self.schedulers[rank]
        return (
            sorted(guest._pool._free().tolist()),
            sorted(guest._pool.held),
            (guest.tokens, guest.sequences),
            [each.rid for each in scheduler.running_batch.reqs],
            [each.rid for each in scheduler.waiting_queue],
            [run.tolist() for run in scheduler.tree_cache.runs],
            scheduler.told,
            scheduler.invariant_checker.max_total_num_tokens,
        )


@pytest.fixture
def guest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> Iterator[RankedGuest]:
    monkeypatch.setattr(
        "executor.guest.plugin.Watchdog", lambda *_, **__: SimpleNamespace(start=lambda: None)
    )
    with ControlPage.create(tmp_path / "page") as page:
        yield RankedGuest(page, threads, monkeypatch)


def test_the_first_rank_alone_asks_the_gate(guest: RankedGuest) -> None:
    assert [each.gated for each in guest.guests] == [True, False]
    for scheduler in guest.schedulers:
        scheduler.run("a", 20)
    assert not guest.begin()
    guest.grant(GrantMode.RUN, 64, 0)
    assert guest.begin()
    assert {(each.tokens, each.sequences) for each in guest.guests} == {(64, 8)}
    guest.grant(GrantMode.FREEZE, 64, 0)
    assert not guest.begin()


def test_memory_counts_as_returned_once_both_ranks_returned_it(guest: RankedGuest) -> None:
    guest.grant(GrantMode.RUN, 64, 2)
    began = [each._pager.pages.bytes_total for each in guest.guests if each._pager]
    guest.begin()
    while not guest.guests[0]._pool.unmapped or not guest.guests[0]._pool.pages.settled:
        guest.begin()
    guest.begin()
    state = guest.page.guest.read()
    assert state is not None
    returned = [each._pager.pages.bytes_returned for each in guest.guests if each._pager]
    assert state.granules_mapped == 2
    assert state.bytes_mapped == began[0] - min(returned)
    assert min(returned) > began[0] // 2


@pytest.mark.parametrize("seed", range(6))
def test_ranks_stay_alike_whatever_is_granted_and_asked(guest: RankedGuest, seed: int) -> None:
    rng = random.Random(seed)
    size = guest.guests[0]._pool.granules.granule_blocks
    total = guest.guests[0]._pool.granules.count
    for turn in range(60):
        mode = rng.choice([GrantMode.RUN, GrantMode.RUN, GrantMode.FREEZE])
        guest.grant(mode, rng.choice([1, 4, 64]), rng.choice([0, 1, 2, 3, total // 2]))
        guest.begin()
        tokens, action = rng.randrange(1, 2 * size), rng.random()
        for scheduler in guest.schedulers:
            allocator, batch = scheduler.token_to_kv_pool_allocator, scheduler.running_batch
            if action < 0.5 and allocator.available_size() >= tokens:
                scheduler.run(f"r{turn}", tokens)
            elif action < 0.7 and batch.reqs:
                scheduler.release(batch.reqs.pop(0), checkpoint=action < 0.6)
            elif action < 0.8:
                allocator.clear()
                for each in (*batch.reqs, *scheduler.waiting_queue):
                    each.kv.holds_kv = False
                batch.reqs, scheduler.waiting_queue = [], []
                scheduler.tree_cache.runs.clear()
                guest.guests[guest.schedulers.index(scheduler)]._pool.cleared()
    assert guest.page.guest.read() is not None


def test_a_rank_whose_pages_fail_ends_the_guest(
    guest: RankedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ExecutorError("the kernel keeps it")

    pager = guest.guests[1]._pager
    assert pager is not None
    monkeypatch.setattr(pager.pages, "release", refuse)
    guest.grant(GrantMode.RUN, 64, 2)
    guest.threads.all(lambda rank: guest.guests[rank].begin(guest.schedulers[rank].running_batch))
    with pytest.raises(RankError, match="rank 1: the kernel keeps it"):
        guest.guests[0].permit()


@pytest.mark.parametrize("broken", [0, 1])
def test_ranks_fail_together_if_one_has_no_pages_to_move(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    made = schedulers(threads, monkeypatch)
    made[broken].token_to_kv_pool_allocator.get_kvcache = lambda: SimpleNamespace()  # type: ignore[method-assign]

    def memory(rank: int) -> str:
        ranks = RankGroup.of(threads.tp_group(rank))
        with pytest.raises(RankError) as failed:
            rank_memory(ranks, made[rank].token_to_kv_pool_allocator, "madvise")
        return str(failed.value)

    first, second = threads.all(memory)
    assert first == second
    assert first.startswith("rank 0: ROSE_KV_BACKEND is madvise, but ")


def test_a_start_waits_on_all_ranks_for_the_first_ones_gate(threads: Threads) -> None:
    gates = [SimpleNamespace(passes=0, wait=_opens_third(), asked=0) for _ in range(RANKS)]
    threads.all(lambda rank: wait_together(gates[rank], RankGroup.of(threads.tp_group(rank))))  # type: ignore[arg-type]
    assert gates[1].passes == 1


def _opens_third() -> Callable[[float], bool]:
    answers = iter([False, False, True])
    return lambda _most_s: next(answers)


class RankedHost:
    """A host of two ranks that lends, from host memory unless `caches` are given."""

    def __init__(
        self,
        threads: Threads,
        monkeypatch: pytest.MonkeyPatch,
        caches: list[tuple[int, Any]] | None = None,
    ) -> None:
        self.threads = threads
        self.schedulers = []
        for rank in range(RANKS):
            size, cache = caches[rank] if caches else (64 * 64, _host_cache())
            scheduler = StandInScheduler(size, cache, tp_size=2)
            scheduler.tp_group = threads.tp_group(rank)
            self.schedulers.append(scheduler)
        for name, module in self.schedulers[0].modules(*self.schedulers[1:]).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(plugin_module, "check_version", lambda _: None)
        self.hooks = [HostHooks(lends=True) for _ in range(RANKS)]
        threads.all(lambda rank: self.hooks[rank].made(_nothing, self.schedulers[rank]))

    def turn(self) -> None:
        def turned(rank: int) -> list[Any]:
            def broadcast(_: Any, requests: Any) -> Any:
                return list(self.threads.group.gather(rank, requests)[0])

            requests = ["request"] if rank == 0 else None
            found = self.hooks[rank].receive(broadcast, None, requests)
            host = self.hooks[rank].host
            if host is not None:
                host.turn()
                host.idled()
            return list(found)

        assert self.threads.all(turned) == [["request"]] * RANKS, "no message is left among them"
        self.check()

    def check(self) -> None:
        pools = [hooks._pool for hooks in self.hooks]
        assert (pools[0] is None) == (pools[1] is None)
        frees = [each.token_to_kv_pool_allocator.get_all_free_pages() for each in self.schedulers]
        assert sorted(frees[0].tolist()) == sorted(frees[1].tolist())
        if pools[0] is not None and pools[1] is not None:
            assert pools[0].held == pools[1].held
            assert pools[0].lent_blocks == pools[1].lent_blocks

    def alloc(self, tokens: int) -> list[torch.Tensor | None]:
        def allocated(rank: int) -> Any:
            allocator = self.schedulers[rank].token_to_kv_pool_allocator
            return self.hooks[rank].allocate(type(allocator).alloc, allocator, tokens)

        return self.threads.all(allocated)

    def available(self, rank: int) -> int:
        allocator = self.schedulers[rank].token_to_kv_pool_allocator
        return self.hooks[rank].available(type(allocator).available_size, allocator)


def _host_cache() -> Any:
    keys, values = (torch.ones(64 * 64 + 1, 1, 1024) for _ in range(2))
    return StandInPool(keys=[keys], values=[values])


@pytest.fixture
def lends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ROSE_ROLE": "host",
        "ROSE_HOST_LEVEL": "lend",
        "ROSE_HOST_PREFIX_COLD_S": "0",
        "ROSE_CONTROL_PAGE": str(tmp_path / "page"),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def host(lends: None, monkeypatch: pytest.MonkeyPatch, threads: Threads) -> Iterator[RankedHost]:
    made = RankedHost(threads, monkeypatch)
    yield made
    assert made.hooks[0].host is not None
    made.hooks[0].host.leave()


def test_both_ranks_lend_the_same_granules(host: RankedHost) -> None:
    for _ in range(64):
        host.turn()
    lender = host.hooks[0].host.lender  # type: ignore[union-attr]
    assert lender is not None
    assert lender.lent.granules_lent == 64 - lender.reserve
    assert lender.lent.bytes_lent > 20 << 20
    assert host.available(0) == host.available(1) == 64 * 64
    for scheduler in host.schedulers:
        keys = scheduler.token_to_kv_pool_allocator.get_kvcache().k_buffer[0]
        start = keys.data_ptr() + keys.nbytes // 2
        assert resident_bytes(Range(start, start + (1 << 20)).whole_pages()) == 0


def test_each_rank_takes_the_same_back_within_an_allocation(host: RankedHost) -> None:
    for _ in range(64):
        host.turn()
    first, second = host.alloc(64 * 30)
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    host.check()
    host.turn()
    first, second = host.alloc(64 * 34)
    assert first is not None
    assert second is not None
    host.turn()
    assert host.available(0) == host.available(1) == 0


def test_cold_prefixes_are_forgotten_on_both(host: RankedHost) -> None:
    both = host.alloc(64 * 40)
    for scheduler, slots in zip(host.schedulers, both, strict=True):
        assert slots is not None
        for run in torch.split(slots, 64):
            scheduler.tree_cache.keep(run)
    for _ in range(64):
        host.turn()
        trees = [[run.tolist() for run in each.tree_cache.runs] for each in host.schedulers]
        assert trees[0] == trees[1]
    assert trees[0] == []


def test_a_host_that_stops_lending_stops_on_both_ranks(host: RankedHost) -> None:
    for _ in range(64):
        host.turn()
    first = host.hooks[0].host
    assert first is not None
    first.stop_lending(ExecutorError("enough"))
    assert first.lender is not None, "the other rank has not heard of it"
    host.turn()
    assert first.lender is None
    for scheduler in host.schedulers:
        assert scheduler.token_to_kv_pool_allocator.available_size() == 64 * 64
        assert not scheduler.token_to_kv_pool_allocator.need_sort
    host.turn()


@pytest.mark.parametrize("wrong", ["ROSE_HOST_RESERVE", "the page"])
def test_no_rank_waits_for_a_first_one_that_does_not_lend(
    lends: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Threads, wrong: str
) -> None:
    if wrong == "the page":
        (tmp_path / "page").write_text("not a page")
    else:
        monkeypatch.setenv(wrong, "2")
    made = RankedHost(threads, monkeypatch)
    made.turn()
    assert [hooks._pool for hooks in made.hooks] == [None, None]
    assert made.hooks[0].host is not None
    made.hooks[0].host.leave()


def test_ranks_of_gpus_take_back_what_all_of_them_have_again(
    lends: None, monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> None:
    """The second GPU is full until its other process ends: no rank has a granule before."""
    devices = [StandInDevice((ALL + 4) * PAGE) for _ in range(RANKS)]
    memories = [GpuMemory(device, settings_of("host")) for device in devices]
    made = RankedHost(
        threads,
        monkeypatch,
        [(GPU_SLOTS, device_cache(each.reservation.address)) for each in memories],
    )
    host = made.hooks[0].host
    assert host is not None
    for _ in range(80):
        made.turn()
    held = set(host.pool.held) if host.pool is not None else set()
    assert len(held) > GRANULES // 2
    lent = [(ALL + 1) * PAGE - device.used_bytes for device in devices]
    assert lent == [len(held) * PARTS * PAGE] * RANKS
    other = devices[1].allocate(devices[1].total_bytes - devices[1].used_bytes)
    other.users += 1
    for scheduler in made.schedulers:
        scheduler.waiting_queue.append(StandInRequest("a", [1] * (12 * TOKENS)))
    for _ in range(40):
        made.turn()
    assert host.pool is not None
    assert host.pool.held == held, "one rank alone has memory for them"
    devices[1].drop(other)
    for _ in range(200):
        made.turn()
        for memory in memories:
            memory.check(host.pool.held)
    assert len(host.pool.held) < len(held)
    host.leave()


def _nothing(*_: object) -> None: ...
