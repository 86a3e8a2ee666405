"""SGLang's KV memory on a stand-in GPU: reserved buffers, a guest's balloon, a host's loans."""

import random
import sys
import time
from collections.abc import Callable, Iterator
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
    SLOTS,
    TOKENS,
    GpuMemory,
    device_cache,
    settings_of,
)

import executor.cuda.kv_memory as source_module
import executor.sglang.host.plugin as plugin_module
import executor.sglang.reserved_pool as reserved_module
from executor import ControlPage, Grant, GrantMode, HostState
from executor.cuda.backing import CudaPages
from executor.cuda.page_pool import PageClient, PagePool
from executor.engine_settings import CUDA, GUEST, HOST, LEND, EngineSettings
from executor.errors import DeviceMemoryShort, ExecutorError
from executor.host.kv_lender import HOLD_NS
from executor.sglang.guest.plugin import GuestScheduler
from executor.sglang.host.kv_lender import CudaLendingAllocator, DecodeHold
from executor.sglang.host.plugin import HostHooks
from executor.sglang.kv_pool import kv_pages
from executor.sglang.reserved_pool import ReservedBuffers
from tests.fakes.cuda.driver import PAGE, StandInDevice, StandInDriver
from tests.fakes.sglang_scheduler import StandInBatch, StandInRequest, StandInScheduler
from tests.harness.seated_host import SeatedHost

MS = 1_000_000


class MHATokenToKVPool:
    """SGLang's own, as far as it allocates: keys and values are halves of one tensor a layer."""

    def __init__(self, rows: int, page_size: int, row: tuple[int, ...], layers: int = 2) -> None:
        self.rows, self.page_size, self.row, self.layers = rows, page_size, row, layers
        self.device = "cpu"
        self.made = 0

    def create_buffers(self) -> None:
        self.made += 1
        fused = [
            torch.zeros((2, self.rows, *self.row), dtype=torch.float16, device=self.device)
            for _ in range(self.layers)
        ]
        self.k_buffer = [each[0, : self.rows] for each in fused]
        self.v_buffer = [each[1, : self.rows] for each in fused]
        torch.tensor([each.data_ptr() for each in self.k_buffer], dtype=torch.uint64)


class MLATokenToKVPool(MHATokenToKVPool):
    def create_buffers(self) -> None:
        self.made += 1
        self.kv_buffer = [
            torch.zeros((self.rows, *self.row), dtype=torch.float16, device=self.device)
            for _ in range(self.layers)
        ]


class ReservedOnCpu(ReservedBuffers):
    """Hook whose GPU is this machine's memory; `sizes`: what was reserved."""

    device_type = "cpu"

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.sizes: list[int] = []
        self.fails: Exception | None = None

    def open_driver(self) -> Any:
        if self.fails is not None:
            raise self.fails
        return StandInDriver(StandInDevice(1 << 30))

    def memory(self, driver: Any, size: int) -> torch.Tensor:
        self.sizes.append(size)
        # Addresses of pages are those of this buffer's bytes.
        return torch.zeros(size + PAGE, dtype=torch.int8)[:size]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ReservedOnCpu:
    monkeypatch.setattr(reserved_module, "check_version", lambda _: None)
    return ReservedOnCpu(settings_of(GUEST))


def test_each_part_begins_on_a_page_and_is_what_sglang_asked_for(hook: ReservedOnCpu) -> None:
    pool = MHATokenToKVPool(rows=2049, page_size=1, row=(8, 128))
    hook(MHATokenToKVPool.create_buffers, pool)
    first = pool.k_buffer[0].data_ptr()
    for part in (*pool.k_buffer, *pool.v_buffer):
        assert (part.data_ptr() - first) % PAGE == 0
        assert part.shape == (2049, 8, 128)
        assert part.is_contiguous()
        assert not part.any()
    # 2049 rows of 2 KiB take three pages, in each of two halves of two layers.
    assert hook.sizes == [12 * PAGE]
    ends = sorted(part.data_ptr() for part in (*pool.k_buffer, *pool.v_buffer))
    assert [(end - first) // PAGE for end in ends] == [0, 3, 6, 9]


def test_kernels_count_blocks_from_keys_to_values(hook: ReservedOnCpu) -> None:
    pool = MHATokenToKVPool(rows=2048 + 64, page_size=64, row=(8, 128))
    hook(MHATokenToKVPool.create_buffers, pool)
    apart = pool.v_buffer[0].data_ptr() - pool.k_buffer[0].data_ptr()
    assert apart % (64 * 8 * 128 * 2) == 0


def test_rows_that_do_not_fill_pages_keep_their_places(hook: ReservedOnCpu) -> None:
    pool = MHATokenToKVPool(rows=100, page_size=1, row=(5, 96))
    hook(MHATokenToKVPool.create_buffers, pool)
    apart = pool.v_buffer[0].data_ptr() - pool.k_buffer[0].data_ptr()
    assert apart == 100 * 5 * 96 * 2
    assert hook.sizes == [2 * PAGE]


def test_latent_keys_lie_layer_after_layer(hook: ReservedOnCpu) -> None:
    pool = MLATokenToKVPool(rows=4096, page_size=1, row=(1, 576))
    hook(MLATokenToKVPool.create_buffers, pool)
    apart = pool.kv_buffer[1].data_ptr() - pool.kv_buffer[0].data_ptr()
    assert apart == 3 * PAGE
    assert hook.sizes == [6 * PAGE]


def test_a_pool_of_another_kind_is_sglangs_own(hook: ReservedOnCpu) -> None:
    class MHATokenToKVPoolFP4(MHATokenToKVPool): ...

    pool = MHATokenToKVPoolFP4(rows=10, page_size=1, row=(1, 8))
    hook(MHATokenToKVPool.create_buffers, pool)
    assert (pool.made, hook.sizes) == (1, [])


@pytest.mark.parametrize("role", [HOST, GUEST])
def test_a_host_starts_without_a_reservation_and_a_guest_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    monkeypatch.setattr(reserved_module, "check_version", lambda _: None)
    hook = ReservedOnCpu(settings_of(role))
    hook.fails = ExecutorError("no driver")
    pool = MHATokenToKVPool(rows=10, page_size=1, row=(1, 8))
    if role == GUEST:
        with pytest.raises(ExecutorError, match="no driver"):
            hook(MHATokenToKVPool.create_buffers, pool)
        return
    hook(MHATokenToKVPool.create_buffers, pool)
    assert pool.made == 1
    assert "the host serves without lending: no driver" in caplog.text


@pytest.mark.parametrize(
    ("role", "level", "backend", "hooked"),
    [
        (GUEST, "observe", CUDA, True),
        (GUEST, "observe", "auto", False),
        (HOST, LEND, CUDA, True),
        (HOST, "observe", CUDA, False),
        ("", "observe", CUDA, False),
    ],
)
def test_only_memory_that_is_to_move_is_reserved(
    role: str, level: str, backend: str, *, hooked: bool
) -> None:
    settings = EngineSettings(role, "", 0.0, 0.0, 60.0, level=level, kv_backend=backend)
    assert bool(ReservedBuffers(settings).hooks) is hooked


def test_pages_of_a_granule_are_one_of_each_part(quiet: None) -> None:
    memory = GpuMemory(StandInDevice(2 * ALL * PAGE), settings_of(GUEST))
    scheduler = StandInScheduler(SLOTS, device_cache(memory.reservation.address))
    pages, granules = kv_pages(scheduler.token_to_kv_pool_allocator, CUDA)
    assert isinstance(pages, CudaPages)
    assert (granules.count, granules.granule_blocks) == (GRANULES, TOKENS)
    pages.release([3])
    assert pages.bytes_returned == PARTS * PAGE


def test_memory_that_rose_did_not_reserve_is_refused_in_one_line() -> None:
    scheduler = StandInScheduler(SLOTS, device_cache(1 << 30))
    with pytest.raises(ExecutorError, match="ROSE did not reserve; set ROSE_KV_BACKEND=cuda"):
        kv_pages(scheduler.token_to_kv_pool_allocator, CUDA)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "HEADROOM_BYTES", 0)
    monkeypatch.setattr(
        "executor.guest.plugin.Watchdog", lambda *_, **__: SimpleNamespace(start=lambda: None)
    )


class GpuGuest:
    """A guest on a GPU whose free memory is the test's to take."""

    def __init__(self, folder: Path, device: StandInDevice) -> None:
        self.page = ControlPage.create(folder / "page")
        settings = settings_of(GUEST, page=str(self.page.path))
        self.memory = GpuMemory(device, settings)
        cache = device_cache(self.memory.reservation.address)
        self.scheduler = StandInScheduler(SLOTS, cache)
        self.guest = GuestScheduler(self.scheduler, settings)
        self.host = SeatedHost(self.page, time.monotonic_ns)

    def grant(self, cap: int) -> None:
        now_ns = time.monotonic_ns()
        self.host.tell()
        until_ns = now_ns + 2_000 * MS
        self.page.grant.write(
            Grant(
                GrantMode.RUN,
                token_budget=64,
                max_sequences=8,
                kv_granule_cap=cap,
                expiry_ns=until_ns,
                heartbeat_ns=now_ns,
            )
        )

    def begin(self) -> bool:
        began = self.guest.begin(self.scheduler.running_batch)
        self.memory.check(self.guest._pool.held)
        return began


def test_a_guest_gives_pages_of_a_gpu_back_and_gets_them_again(tmp_path: Path, quiet: None) -> None:
    device = StandInDevice(2 * ALL * PAGE)
    rig = GpuGuest(tmp_path, device)
    full = device.used_bytes
    rig.scheduler.run("a", 10)
    rig.grant(cap=4)
    assert rig.begin() or rig.begin()
    assert full - device.used_bytes == (GRANULES - 4) * PARTS * PAGE
    state = rig.page.guest.read()
    assert state is not None
    assert (state.granules_mapped, state.bytes_mapped) == (4, 4 * PARTS * PAGE)
    rig.grant(cap=0)
    while rig.guest._kv.ballooned:
        rig.begin()
    assert device.used_bytes == full
    rig.page.close()


def test_a_guest_begins_with_the_memory_that_there_is(tmp_path: Path, quiet: None) -> None:
    device = StandInDevice((5 * PARTS + 1) * PAGE)
    rig = GpuGuest(tmp_path, device)
    assert len(rig.guest._pool.held) == GRANULES - 5
    free = rig.scheduler.token_to_kv_pool_allocator.available_size()
    assert free == 5 * TOKENS - 1 == rig.scheduler.invariant_checker.max_total_num_tokens
    rig.scheduler.run("a", 10)
    rig.grant(cap=0)
    assert rig.begin(), "it works with what it has"
    device.total_bytes *= 4
    time.sleep(0.11)
    while rig.guest._kv.ballooned:
        rig.begin()
    assert rig.scheduler.invariant_checker.max_total_num_tokens == SLOTS
    rig.page.close()


class BorrowedPages:
    """Another process of the GPU, which takes what the host lent."""

    def __init__(self, device: StandInDevice, socket: Path | None) -> None:
        self.driver = StandInDriver(device)
        own = PagePool(self.driver, PAGE)
        self.source = own if socket is None else PageClient(self.driver, PAGE, socket, own)
        self.pages: list[Any] = []

    def grow(self) -> None:
        self.source.step()
        try:
            while True:
                if isinstance(self.source, PageClient) and not self.source.unmapped:
                    return
                self.pages += self.source.take(1)
        except DeviceMemoryShort:
            return

    def obey(self) -> None:
        self.source.step()
        if isinstance(self.source, PageClient):
            wanted = min(len(self.pages), self.source.wanted)
            self.source.give([self.pages.pop() for _ in range(wanted)])

    def give_all(self) -> None:
        self.source.step()
        self.source.give(self.pages)
        self.pages = []


class GpuHost:
    """A lending host on a GPU, by the hooks that SGLang calls."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, device: StandInDevice, socket: str
    ) -> None:
        for name, value in {
            "ROSE_ROLE": "host",
            "ROSE_HOST_LEVEL": "lend",
            "ROSE_CONTROL_PAGE": str(folder / "page"),
            "ROSE_KV_BACKEND": "cuda",
            "ROSE_HOST_PREFIX_COLD_S": "0",
            "ROSE_PAGE_SOCKET": socket,
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(plugin_module, "check_version", lambda _: None)
        self.memory = GpuMemory(device, settings_of(HOST, socket=socket))
        cache = device_cache(self.memory.reservation.address)
        self.scheduler = StandInScheduler(SLOTS, cache)
        for name, module in self.scheduler.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        self.hooks = HostHooks(lends=True)
        self.hooks.made(_nothing, self.scheduler)
        assert self.hooks.host is not None
        self.host = self.hooks.host
        self.allocator = self.scheduler.token_to_kv_pool_allocator

    @property
    def pool(self) -> CudaLendingAllocator:
        assert isinstance(self.host.pool, CudaLendingAllocator)
        return self.host.pool

    def turn(self) -> None:
        self.host.turn()
        self.host.idled()
        self.check()

    def check(self) -> None:
        self.memory.check(set(self.pool.held) if self.host.pool is not None else set())

    def decode(self, lacks: bool) -> Any:
        """Ask for a decode of the running requests; returns None or what SGLang does."""
        batch = StandInBatch(self.scheduler.running_batch.reqs)
        batch.check_decode_mem = lambda: not lacks  # type: ignore[attr-defined]
        batch.is_empty = lambda: not batch.reqs  # type: ignore[attr-defined]
        return self.hooks.update_running_batch(lambda *_: "decode", self.scheduler, batch)

    @property
    def state(self) -> HostState:
        with ControlPage.open(Path(self.host._seat._page.path)) as page:  # type: ignore[union-attr]
            state = page.host.read()
        assert state is not None
        return state


@pytest.fixture(params=["driver", "handle"])
def gpu_host(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[GpuHost, BorrowedPages, StandInDevice]]:
    device = StandInDevice((ALL + 8) * PAGE)
    socket = tmp_path / "pages" if request.param == "handle" else None
    host = GpuHost(tmp_path, monkeypatch, device, str(socket or ""))
    yield host, BorrowedPages(device, socket), device
    host.host.leave()


def _turns(host: GpuHost, act: Callable[[], None], count: int = 60) -> None:
    for _ in range(count):
        host.turn()
        act()


def test_what_a_host_lends_of_a_gpu_is_another_processs_and_sglangs_no_more(
    gpu_host: tuple[GpuHost, BorrowedPages, StandInDevice],
) -> None:
    host, other, _ = gpu_host
    _turns(host, other.grow)
    lender = host.host.lender
    assert lender is not None
    lent = GRANULES - lender.reserve - 1  # Slot 0 is not a free one.
    assert lender.lent.granules_lent == lent
    assert len(other.pages) >= lent * PARTS
    free = host.hooks.available(type(host.allocator).available_size, host.allocator)
    assert free == SLOTS - lent * TOKENS
    assert host.scheduler.invariant_checker.max_total_num_tokens == free
    host.host.observer.publish()  # type: ignore[union-attr]
    _, _, used, total = host.host.observer._figures()  # type: ignore[union-attr]
    assert (used, total) == (0, SLOTS)


def test_memory_comes_back_for_a_request_once_the_other_process_gave_it(
    gpu_host: tuple[GpuHost, BorrowedPages, StandInDevice],
) -> None:
    host, other, _ = gpu_host
    _turns(host, other.grow)
    waits = StandInRequest("a", [1] * (10 * TOKENS))
    host.scheduler.waiting_queue.append(waits)
    held = len(host.pool.held)
    _turns(host, lambda: None, 5)
    if isinstance(other.source, PageClient):
        _turns(host, other.obey)
    else:
        other.give_all()
        _turns(host, lambda: None)
    assert len(host.pool.held) < held
    found = host.hooks.allocate(type(host.allocator).alloc, host.allocator, 10 * TOKENS)
    assert found is not None
    assert not {int(slot) // TOKENS for slot in found} & set(host.pool.held)


def test_a_decode_waits_for_lent_blocks_and_not_for_others(
    gpu_host: tuple[GpuHost, BorrowedPages, StandInDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other, _ = gpu_host
    now_ns = [10**12]
    monkeypatch.setattr(plugin_module.time, "monotonic_ns", lambda: now_ns[0])
    for name in "ab":
        host.scheduler.run(name, 10)
    assert host.decode(lacks=True) == "decode", "nothing is lent"
    _turns(host, other.grow, 3)
    while not host.pool.held:
        now_ns[0] += 2_000 * MS
        host.turn()
    assert host.decode(lacks=False) == "decode"
    assert host.decode(lacks=True) is None
    now_ns[0] += HOLD_NS - 1
    assert host.decode(lacks=True) is None
    now_ns[0] += 1
    assert host.decode(lacks=True) == "decode", "SGLang retracts"
    assert host.decode(lacks=False) == "decode"
    assert host.decode(lacks=True) is None, "the next hold"


def test_the_last_request_waits_for_as_long_as_anything_is_lent() -> None:
    hold = DecodeHold()
    assert hold.waits(0, 1)
    assert hold.waits(100 * HOLD_NS, 1)
    assert not hold.waits(100 * HOLD_NS, 2)


def test_a_host_on_a_gpu_stops_lending_when_the_pages_are_back(
    gpu_host: tuple[GpuHost, BorrowedPages, StandInDevice],
) -> None:
    host, other, _ = gpu_host
    _turns(host, other.grow)
    host.host.stop_lending(ExecutorError("enough"))
    assert host.host.lender is not None
    if isinstance(other.source, PageClient):
        for _ in range(200):
            host.host.idled()
            other.obey()
            time.sleep(0.001)
    else:
        other.give_all()
        for _ in range(200):
            host.host.idled()
            time.sleep(0.001)
    assert host.host.lender is None
    assert host.allocator.available_size() == SLOTS
    assert not host.allocator.need_sort
    assert host.scheduler.invariant_checker.max_total_num_tokens == SLOTS
    host.check()


def test_the_memory_to_which_padding_is_written_is_never_lent(
    gpu_host: tuple[GpuHost, BorrowedPages, StandInDevice],
) -> None:
    host, _, _ = gpu_host
    assert host.allocator.available_size() == SLOTS
    # All are free, and a turn may come in which all of them are asked for.
    count = host.pool.granules.count
    assert sorted(host.pool.lendable(count)) == list(range(1, count))
    assert host.pool.take([0, 1], fence=0) == 1
    assert host.pool.held == {1}


@pytest.mark.parametrize("seed", range(4))
def test_no_slot_is_lost_and_none_lacks_memory(
    gpu_host: tuple[GpuHost, BorrowedPages, StandInDevice], seed: int
) -> None:
    host, other, _ = gpu_host
    rng, kind = random.Random(seed), type(host.allocator)
    owned: list[torch.Tensor] = []
    for _ in range(150):
        action = rng.random()
        if action < 0.35:
            got = host.hooks.allocate(kind.alloc, host.allocator, rng.randrange(1, 2 * TOKENS))
            if got is not None:
                owned.append(got)
        elif action < 0.6 and owned:
            host.allocator.free(owned.pop(rng.randrange(len(owned))))
        elif action < 0.7 and owned:
            host.scheduler.tree_cache.keep(owned.pop())
        host.scheduler.waiting_queue[:] = (
            [StandInRequest("w", [1] * rng.randrange(1, 4 * TOKENS))] if action > 0.8 else []
        )
        host.turn()
        rng.choice([other.grow, other.obey])()
        cached = [slot for run in host.scheduler.tree_cache.runs for slot in run.tolist()]
        used = [slot for slots in owned for slot in slots.tolist()]
        free = host.allocator.get_all_free_pages().tolist()
        lent = [b for granule in host.pool.held for b in host.pool.granules.blocks_of(granule)]
        assert sorted([*cached, *used, *free, *lent]) == list(range(1, SLOTS + 1))


def _nothing(*_: object) -> None: ...
