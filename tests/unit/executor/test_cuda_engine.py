"""An engine's KV cache on a GPU: found or refused in one line, shrunk and grown under its grant."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_cases import BLOCK_TOKENS, kv_config
from standin_driver import PAGE, StandInDevice, StandInDriver
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from executor import ExecutorError, Grant
from executor.cuda.cuda_pages import CudaPages
from executor.cuda.reservation import Reservation
from executor.pages import NoPages
from executor.vllm.ballooned_pool import BalloonedPool
from executor.vllm.guest_kv import GROWTH_RETRY_NS, GuestKv
from executor.vllm.kv_storage import kv_pages
from executor.vllm.reserved_worker import ReservedZeros

# K and V of 16 tokens, 32 heads of 128 in fp32: half a MiB, so that four blocks fill a page.
WIDE = FullAttentionSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=32, head_size=128, dtype=torch.float32
)
BLOCKS = 32


def on_device(address: int, size: int, kind: str = "cuda") -> Any:
    """A KV tensor as the configuration leads to it."""
    storage = SimpleNamespace(nbytes=lambda: size, data_ptr=lambda: address)
    return SimpleNamespace(device=torch.device(kind), untyped_storage=lambda: storage)


def engine(cache: Any, config: KVCacheConfig) -> Any:
    layers = {name: SimpleNamespace(kv_cache=cache) for name in config.kv_cache_tensors[0].layers}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def size_of(config: KVCacheConfig) -> int:
    return config.kv_cache_tensors[0].size


@pytest.mark.parametrize(
    ("blocks", "granule_blocks"), [(BLOCKS, 4), (BLOCKS + 1, 16)], ids=["aligned", "not aligned"]
)
def test_a_reserved_cache_is_found_by_its_address(blocks: int, granule_blocks: int) -> None:
    config = kv_config(blocks, WIDE)
    reservation = Reservation(StandInDriver(StandInDevice(64 * PAGE)), size_of(config))
    vllm = engine(on_device(reservation.address, size_of(config)), config)
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
    config = kv_config(BLOCKS, WIDE)
    with pytest.raises(ExecutorError, match=message):
        kv_pages(engine(on_device(PAGE, size_of(config), kind), config), config, backend)


def test_without_a_wish_memory_that_nobody_reserved_is_left_alone() -> None:
    config = kv_config(BLOCKS, WIDE)
    pages, _ = kv_pages(engine(on_device(PAGE, size_of(config)), config), config)
    assert isinstance(pages, NoPages)
    with pytest.raises(ExecutorError, match="out of this process's reach"):
        kv_pages(engine(SimpleNamespace(), config), config, "cuda")


def test_a_guest_shrinks_at_once_and_grows_when_the_memory_is_there() -> None:
    config = kv_config(BLOCKS, WIDE)
    device = StandInDevice(64 * PAGE)
    reservation = Reservation(StandInDriver(device), size_of(config))
    pages, granules = kv_pages(
        engine(on_device(reservation.address, size_of(config)), config), config
    )
    manager: Any = KVCacheManager(
        kv_cache_config=config,
        max_model_len=512,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        enable_caching=False,
    )
    now_ns = [1]
    pool = BalloonedPool(manager.block_pool, granules, pages)
    kv = GuestKv(pool, list, lambda _ids: None, clock_ns=lambda: now_ns[0])

    def fit(cap: int) -> None:
        live = {"heartbeat_ns": now_ns[0], "expiry_ns": now_ns[0] + 10**9}
        assert kv.fit(Grant(kv_granule_cap=cap, **live))

    before = device.used_bytes
    fit(2)
    assert kv.mapped.granules_mapped == 2
    assert before - device.used_bytes == size_of(config) - kv.mapped.bytes_mapped == 12 * PAGE
    host = StandInDriver(device)
    theirs = [host.create(PAGE) for _ in range((device.total_bytes - device.used_bytes) // PAGE)]
    fit(8)
    assert kv.mapped.granules_mapped == 2, "there is no memory to grow into"
    assert manager.block_pool.num_gpu_blocks == 2 * 4
    for handle in theirs[:6]:
        host.release(handle)
    calls = now_ns[0]
    fit(8)
    assert (now_ns[0], kv.mapped.granules_mapped) == (calls, 2), "it does not ask again at once"
    now_ns[0] += GROWTH_RETRY_NS
    fit(8)
    assert kv.mapped.granules_mapped == 5, "half of what it wanted first"
    for handle in theirs[6:]:
        host.release(handle)
    for _ in range(3):
        now_ns[0] += GROWTH_RETRY_NS
        fit(8)
    assert kv.mapped.granules_mapped == 8
    assert kv.mapped.bytes_mapped == size_of(config)
    reservation.close()


def test_vllms_own_allocation_is_replaced_and_no_other() -> None:
    config = kv_config(BLOCKS, WIDE)
    ours = torch.zeros(size_of(config), dtype=torch.int8)
    cpu = torch.device("cpu")
    with ReservedZeros(size_of(config), "cpu", lambda: ours) as zeros:
        assert torch.zeros(size_of(config), dtype=torch.uint8).data_ptr() != ours.data_ptr()
        assert torch.zeros(4, dtype=torch.int8, device=cpu).shape == (4,)
        assert zeros.handed_out == 0
        caches = allocate_kv_cache(config, cpu, KVCacheLayout.LBHNC)
    assert zeros.handed_out == 1
    addresses = {cache.untyped_storage().data_ptr() for cache in caches.values()}
    assert addresses == {ours.data_ptr()}
