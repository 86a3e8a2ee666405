"""KV caches of every kind of layer, as vLLM's own planner lays them out: a released block takes its
own bytes with it, in every layer, and no byte of another block."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_host_cases import on_a_device
from kv_cases import engine_of

pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM 0.25 has no layouts to choose from")

from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from executor.cuda.backing import CudaPages, Reservation
from executor.kv.backing import (
    Extent,
    HostPages,
    NoPages,
    Range,
    blocks_of_runs,
    resident_bytes,
)
from executor.kv.shrink_plan import KvGroup, blocks_in
from executor.vllm.kv_backing import kv_groups, kv_layout, kv_pages
from tests.fakes.cuda.driver import PAGE, StandInDevice, StandInDriver

MEMORY = 24 << 20
SHAPE: dict[str, Any] = {"block_size": 32, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(num_kv_heads=2, **SHAPE)
SMALL = FullAttentionSpec(num_kv_heads=1, **SHAPE)
ODD = FullAttentionSpec(num_kv_heads=3, **SHAPE)
WINDOW = SlidingWindowSpec(num_kv_heads=2, sliding_window=64, **SHAPE)
CHUNK = ChunkedLocalAttentionSpec(num_kv_heads=2, attention_chunk_size=128, **SHAPE)
STATE = MambaSpec(
    block_size=512,
    shapes=((3, 200), (4, 32, 16)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=FULL.page_size_bytes,
)
LATENT = MLAAttentionSpec(
    block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, tokens_per_state=1
)
INDEXER = MLAAttentionSpec(
    block_size=32, num_kv_heads=1, head_size=132, dtype=torch.uint8, tokens_per_state=1
)
MODELS: dict[str, list[KVCacheSpec]] = {
    "full attention": [FULL] * 4,
    "sliding windows": [WINDOW, WINDOW, FULL] * 2,
    "chunked local attention": [CHUNK, CHUNK, CHUNK, FULL],
    "states": [STATE, STATE, STATE, FULL],
    "states and windows": [STATE, WINDOW, FULL],
    "target and draft": [FULL, FULL, FULL, SMALL],
    "target and draft of odd size": [FULL, FULL, ODD],
    "latents": [LATENT] * 3,
    "latents and an indexer": [LATENT, INDEXER] * 3,
    "windows of another size": [WINDOW, SMALL],
    "windows of an odd size": [WINDOW, ODD],
}
SHARED = {
    ("states", "LHBNC"),
    ("states and windows", "LHBNC"),
    ("windows of another size", "LHBNC"),
}
"""Plans of vLLM's in which a block of one group has bytes of another block of a second group."""
LAYOUTS = ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"]


def planned(specs: list[KVCacheSpec], layout: str) -> KVCacheConfig:
    """vLLM's plan; skips a layout that cannot have these layers."""
    vllm: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
    )
    named = {f"layers.{number}": spec for number, spec in enumerate(specs)}
    try:
        return get_kv_cache_config_from_groups(vllm, get_kv_cache_groups(vllm, named), MEMORY)
    except (AssertionError, ValueError) as error:
        pytest.skip(f"vLLM: {error}")


def spec_of(config: KVCacheConfig, name: str) -> KVCacheSpec:
    (group,) = (group for group in config.kv_cache_groups if name in group.layer_names)
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def tensors_of(config: KVCacheConfig, caches: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Each layer's tensors as the layer has them: states are one tensor a state."""

    def states(pages: torch.Tensor, spec: MambaSpec) -> tuple[torch.Tensor, ...]:
        found, offset = [], 0
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            found.append(pages[:, offset : offset + size].view(dtype).view(-1, *shape))
            offset += size
        return tuple(found)

    return {
        name: states(cache.squeeze(dim=(1, 2)), spec)
        if isinstance(spec := spec_of(config, name), MambaSpec)
        else cache
        for name, cache in caches.items()
    }


def memory_of(caches: dict[str, torch.Tensor]) -> torch.Tensor:
    """The one allocation under all layers, as bytes."""
    storage = next(iter(caches.values())).untyped_storage()
    return torch.tensor([], dtype=torch.int8).set_(storage)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_released_block_takes_its_own_bytes_and_no_others(model: str, layout: str) -> None:
    config = planned(MODELS[model], layout)
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    engine = engine_of(tensors_of(config, caches))
    pages, granules = kv_pages(engine, config)
    if (model, layout) in SHARED:
        assert isinstance(pages, NoPages)
        return
    assert isinstance(pages, HostPages)
    assert granules.count > 4, granules
    memory = memory_of(caches)
    size, address = len(memory), memory.data_ptr()
    memory.fill_(7)
    held = {2, 3, granules.count - 1}
    pages.release(held)
    resident = resident_bytes(Range(address, address + size).whole_pages())
    assert pages.bytes_returned + resident <= size
    blocks = [number for granule in held for number in granules.blocks_of(granule)]
    whole = len(blocks) * (size // config.num_blocks)
    assert pages.bytes_returned > 0.93 * whole
    kept = torch.ones(config.num_blocks, dtype=torch.bool)
    kept[blocks] = False
    for name, cache in caches.items():
        content = cache.reshape(config.num_blocks, -1).view(torch.int8)[kept]
        lost = int((content != 7).sum())
        assert lost == 0, f"{name}: blocks in use lost content"
    gone = int((memory == 0).sum())
    assert pages.bytes_returned <= gone <= whole


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
@pytest.mark.parametrize("model", MODELS)
def test_pages_of_a_gpu_under_blocks_in_use_stay_mapped(model: str, layout: str) -> None:
    config = planned(MODELS[model], layout)
    views = tensors_of(
        config, allocate_kv_cache(config, torch.device("meta"), KVCacheLayout[layout])
    )
    size = config.kv_cache_tensors[0].size
    device = StandInDevice(-(-size // PAGE) * PAGE + 4 * PAGE)
    reservation = Reservation(StandInDriver(device), size)

    def placed(view: torch.Tensor) -> Any:
        return on_a_device(view, reservation.address, size)

    tensors = {
        name: tuple(map(placed, view)) if isinstance(view, tuple) else placed(view)
        for name, view in views.items()
    }
    pages, granules = kv_pages(engine_of(tensors), config)
    assert isinstance(pages, CudaPages)
    mapping = reservation.mapping

    def gone() -> set[int]:
        return {n for n in range(mapping.pages) if mapping.behind(n) == mapping.alias}

    assert not gone()
    held = set(range(granules.count // 2, granules.count))
    pages.release(held)
    blocks = range(granules.blocks_of(min(held)).start)
    used = {
        (address - reservation.address) // PAGE
        for layer in tensors.values()
        for view in (layer if isinstance(layer, tuple) else (layer,))
        for block in blocks
        for address in ends_of(view, block, config.num_blocks)
    }
    assert not used & gone()
    assert len(gone()) * PAGE > 0.3 * size
    reservation.close()


def ends_of(view: Any, block: int, blocks: int) -> tuple[int, int]:
    """Addresses of the first and the last byte of a block in a layer whose blocks are compact."""
    kernel, size = view.shape[0] // blocks, view.element_size()
    first = view.data_ptr() + block * kernel * view.stride()[0] * size
    inner = sum((n - 1) * step for n, step in zip(view.shape[1:], view.stride()[1:], strict=True))
    return first, first + ((kernel - 1) * view.stride()[0] + inner + 1) * size - 1


def test_a_granule_of_latents_with_an_indexer_is_a_few_pages() -> None:
    """Taken for one page size it had 9 GiB."""
    place = Extent(0, 61 * (41984 + 8448), 61 * (41984 + 8448))
    assert blocks_of_runs([place], 4 * PAGE) == 3


def shifted(cache: torch.Tensor) -> torch.Tensor:
    """The same blocks, half a block further on."""
    return cache.as_strided(cache.shape, cache.stride(), cache.stride(0) // 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda caches: caches.pop("layers.1"),
        lambda caches: caches.update({"layers.1": caches["layers.1"][1:]}),
        lambda caches: caches.update({"layers.1": caches["layers.1"].transpose(0, 1)}),
        lambda caches: caches.update({"layers.1": torch.zeros_like(caches["layers.1"])}),
        lambda caches: caches.update({"layers.1": torch.tensor([])}),
        lambda caches: caches.update({"layers.1": shifted(caches["layers.0"])}),
    ],
    ids=["elsewhere", "other blocks", "other order", "other memory", "not allocated", "skewed"],
)
def test_memory_that_is_not_as_planned_is_left_alone(change: Callable[[Any], object]) -> None:
    config = planned([FULL, FULL], "LBNHC")
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC)
    assert kv_layout(engine_of(caches), config)
    change(caches)
    assert kv_layout(engine_of(caches), config) is None


def test_blocks_of_a_second_pool_are_left_alone() -> None:
    config = planned([FULL, FULL], "LBNHC")
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC)
    config.kv_cache_tensors[0].host_resident = True
    assert kv_layout(engine_of(caches), config) is None


def test_a_turn_needs_blocks_of_every_group() -> None:
    """A window of 64 tokens and a state need no more blocks than they ever hold."""

    def group(most: int) -> SimpleNamespace:
        spec = SimpleNamespace(
            block_size=16, page_size_bytes=100, max_memory_usage_bytes=lambda _limits: 100 * most
        )
        return SimpleNamespace(kv_cache_spec=spec)

    config = SimpleNamespace(kv_cache_groups=[group(1024), group(5), group(1)])
    groups = kv_groups(None, config)
    assert groups == (KvGroup(16, 1024), KvGroup(16, 5), KvGroup(16, 1))
    needed = {1: 3, 17: 5, 16 * 1000: 1006}
    assert {tokens: blocks_in(groups, tokens) for tokens in needed} == needed
    assert blocks_in(groups, 16 * 1000, requests=3) == 1000 + 15 + 3
