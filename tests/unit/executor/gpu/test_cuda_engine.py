"""An engine's KV cache on a GPU: found or refused in one line, shrunk and grown under its grant."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gpu_host_cases import device_caches
from kv_cases import BLOCK_TOKENS, WIDE, engine_of, kv_config, manager_of
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheTensor

from executor import ExecutorError, Grant
from executor.cuda.backing import CudaPages, Reservation
from executor.guest.kv_balloon import GROWTH_RETRY_NS, GuestKv
from executor.kv.backing import Extent, NoPages
from executor.vllm.kv_backing import (
    block_outermost_first,
    check_views,
    kv_layout,
    kv_pages,
    packed,
)
from executor.vllm.kv_block_pool import BalloonedPool
from executor.vllm.reserved_worker import ReservedKvWorker, ReservedZeros
from tests.fakes.cuda.driver import PAGE, StandInDevice, StandInDriver

# 8 heads of 128 in bf16, as those of an 8B model, which has 32 layers.
LLAMA = FullAttentionSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
)
BLOCKS = 16


def on_device(config: KVCacheConfig, address: int, kind: str = "cuda") -> Any:
    """vLLM's configuration with layers whose KV tensors are at an address of a device."""
    return engine_of(device_caches(config, address, kind))


def size_of(config: KVCacheConfig) -> int:
    return config.kv_cache_tensors[0].size


@pytest.fixture
def rows() -> Iterator[None]:
    """Tokens before heads within a block, as the attention of NVIDIA GPUs has them by default."""
    if "layers" in KVCacheTensor.__dataclass_fields__:
        yield
        return
    from older_kv import layout

    with layout("NHD"):
        yield


@pytest.mark.parametrize(
    ("spec", "layers", "granule_blocks"),
    [(WIDE, 2, 2), (LLAMA, 32, 1), (LLAMA, 31, 5)],
    ids=["wide", "an 8B model", "not whole pages"],
)
def test_a_reserved_cache_is_found_by_its_address(
    spec: FullAttentionSpec, layers: int, granule_blocks: int
) -> None:
    config = kv_config(BLOCKS, spec, layers, on_gpu=True)
    reservation = Reservation(StandInDriver(StandInDevice(64 * PAGE)), size_of(config))
    vllm = on_device(config, reservation.address)
    for backend in ("auto", "cuda"):
        pages, granules = kv_pages(vllm, config, backend)
        assert isinstance(pages, CudaPages)
        assert granules.granule_blocks == granule_blocks
        assert pages.bytes_total == size_of(config)
    reservation.close()


@pytest.mark.parametrize(
    ("kind", "backend", "message"),
    [
        ("cuda", "madvise", "is madvise, but the KV cache is on cuda; set ROSE_KV_BACKEND=auto"),
        ("cpu", "cuda", "is cuda, but the KV cache is on cpu; set ROSE_KV_BACKEND=auto"),
        ("cuda", "cuda", "start the engine with --worker-cls .*ReservedKvWorker"),
    ],
)
def test_a_backend_that_cannot_be_had_is_one_clear_line(
    kind: str, backend: str, message: str
) -> None:
    config = kv_config(BLOCKS, WIDE, on_gpu=True)
    with pytest.raises(ExecutorError, match=message):
        kv_pages(on_device(config, PAGE, kind), config, backend)


def test_without_a_wish_memory_that_nobody_reserved_is_left_alone() -> None:
    config = kv_config(BLOCKS, WIDE, on_gpu=True)
    pages, _ = kv_pages(on_device(config, PAGE), config)
    assert isinstance(pages, NoPages)
    with pytest.raises(ExecutorError, match="out of this process's reach"):
        kv_pages(engine_of({}), config, "cuda")
    for out_of_reach in (config, kv_config(BLOCKS, WIDE)):
        pages, _ = kv_pages(engine_of({}), out_of_reach)
        assert pages.bytes_total == BLOCKS * 2 * WIDE.page_size_bytes


def test_a_guest_shrinks_at_once_and_grows_when_the_memory_is_there() -> None:
    config = kv_config(BLOCKS, WIDE, on_gpu=True)
    device = StandInDevice(64 * PAGE)
    reservation = Reservation(StandInDriver(device), size_of(config))
    pages, granules = kv_pages(on_device(config, reservation.address), config)
    manager = manager_of(config)
    now_ns = [1]
    pool = BalloonedPool(manager.block_pool, granules, pages)
    kv = GuestKv(pool, list, lambda _ids: None, clock_ns=lambda: now_ns[0])

    def fit(cap: int) -> None:
        live = {"heartbeat_ns": now_ns[0], "expiry_ns": now_ns[0] + 10**9}
        assert kv.fit(Grant(kv_granule_cap=cap, **live))

    before = device.used_bytes
    fit(2)
    assert kv.mapped.granules_mapped == 2
    assert before - device.used_bytes == size_of(config) - kv.mapped.bytes_mapped == 6 * PAGE
    host = StandInDriver(device)
    theirs = [host.create(PAGE) for _ in range((device.total_bytes - device.used_bytes) // PAGE)]
    fit(8)
    assert kv.mapped.granules_mapped == 2, "there is no memory to grow into"
    assert manager.block_pool.num_gpu_blocks == 2 * 2
    for handle in theirs[:3]:
        host.release(handle)
    calls = now_ns[0]
    fit(8)
    assert (now_ns[0], kv.mapped.granules_mapped) == (calls, 2), "it does not ask again at once"
    now_ns[0] += GROWTH_RETRY_NS
    fit(8)
    assert kv.mapped.granules_mapped == 5, "half of what it wanted first"
    for handle in theirs[3:]:
        host.release(handle)
    for _ in range(3):
        now_ns[0] += GROWTH_RETRY_NS
        fit(8)
    assert kv.mapped.granules_mapped == 8
    assert kv.mapped.bytes_mapped == size_of(config)
    reservation.close()


@pytest.mark.parametrize("lacking", ["check_version", "packed", "open_driver"])
def test_a_host_starts_on_vllms_own_memory_where_none_can_be_reserved(
    lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from executor.vllm import reserved_worker

    def refuse(*_: object) -> None:
        raise ExecutorError(f"no {lacking}")

    monkeypatch.setattr(reserved_worker, lacking, refuse)
    allocated: list[object] = []
    stock = "vllm.v1.worker.gpu_worker.Worker.initialize_from_config"
    monkeypatch.setattr(stock, lambda _self, config: allocated.append(config))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    worker = ReservedKvWorker.__new__(ReservedKvWorker)
    worker.device = torch.device("cuda")
    config = kv_config(BLOCKS, WIDE)
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", "/dev/shm/page")
    with pytest.raises(ExecutorError, match=f"no {lacking}"):
        worker.initialize_from_config(config)
    monkeypatch.setenv("ROSE_ROLE", "host")
    worker.initialize_from_config(config)
    assert allocated == [config]
    assert f"serves on without lending it: no {lacking}" in caplog.text


def test_vllms_own_allocation_is_replaced_and_no_other(rows: None) -> None:
    config = kv_config(BLOCKS, WIDE, on_gpu=True)
    ours = torch.zeros(size_of(config), dtype=torch.int8)
    cpu = torch.device("cpu")
    for allocate in vllms_allocations():
        with ReservedZeros(size_of(config), "cpu", lambda: ours) as zeros:
            assert torch.zeros(size_of(config), dtype=torch.uint8).data_ptr() != ours.data_ptr()
            assert torch.zeros(4, dtype=torch.int8, device=cpu).shape == (4,)
            assert zeros.handed_out == 0
            caches = allocate(config, cpu)
        assert zeros.handed_out == 1
        layout = kv_layout(engine_of(caches), config)
        assert layout is not None
        page = WIDE.page_size_bytes
        expected = [Extent(ours.data_ptr(), 2 * page, 2 * page)]
        assert list(layout.extents) == expected, "a block's layers are neighbours"
        for number, cache in enumerate(caches.values()):
            cache.fill_(number)
        blocks = ours.view(cache.dtype).view(BLOCKS, 2, -1)
        assert bool((blocks[:, 0] == 0).all())
        assert bool((blocks[:, 1] == 1).all())


def vllms_allocations() -> list[Callable[[KVCacheConfig, torch.device], dict[str, torch.Tensor]]]:
    """Return the layers' tensors that each of this vLLM's model runners makes of a plan."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache
    except ImportError:
        import older_kv

        return [older_kv.allocated_by_v1, older_kv.allocated_by_v2]
    return [lambda config, device: allocate_kv_cache(config, device, KVCacheLayout.BLNHC)]


def test_layouts_with_small_granules_are_preferred_where_there_is_a_choice() -> None:
    pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM 0.25 has no layouts to choose from")
    names = block_outermost_first(["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
    assert names == ["BLNHC", "BLHNC", "LBNHC", "LBHNC"]


def test_blocks_that_cannot_be_put_together_are_refused() -> None:
    config = kv_config(BLOCKS, WIDE)
    config.kv_cache_groups.append(config.kv_cache_groups[0])
    if hasattr(config.kv_cache_tensors[0], "layers"):
        assert packed(config) is config
        return
    with pytest.raises(ExecutorError, match="one KV group and layers of one size"):
        packed(config)


def test_views_that_kernels_would_misread_are_refused() -> None:
    with pytest.raises(ExecutorError, match="VLLM_KV_CACHE_LAYOUT=NHD"):
        check_views([torch.zeros(BLOCKS, 2, 3)[:, :, :2]])
    if "layers" in KVCacheTensor.__dataclass_fields__:
        pytest.skip("vLLM 0.32 makes its own views right")
    from older_kv import layout

    config, cpu = kv_config(BLOCKS, WIDE, on_gpu=True), torch.device("cpu")
    for allocate in vllms_allocations():
        with layout("NHD"):
            check_views(allocate(config, cpu).values())
        with layout("HND"):
            caches = allocate(config, cpu).values()
        misread = pytest.raises(ExecutorError, match="VLLM_KV_CACHE_LAYOUT=NHD")
        with misread if {cache.dim() for cache in caches} == {5} else nullcontext():
            check_views(caches)
