"""An SGLang whose allocator or KV addresses behave otherwise than ROSE expects is refused."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from executor.errors import EngineProbeError
from executor.rank_group import RankGroup
from executor.sglang.probes import check_allocator
from executor.sglang.ranks import rank_memory
from tests.fakes.sglang_scheduler import StandInPool, TokenToKVPoolAllocator

SLOTS = 8191


def test_a_probed_allocator_is_as_it_was() -> None:
    probed, fresh = TokenToKVPoolAllocator(SLOTS), TokenToKVPoolAllocator(SLOTS)
    check_allocator(probed)
    assert vars(probed).keys() == vars(fresh).keys()
    assert torch.equal(probed.free_pages, fresh.free_pages)
    assert not len(probed.release_pages)
    assert not probed.need_sort


Own = TokenToKVPoolAllocator


def hands_out_the_highest(allocator: Any, need_size: int) -> Any:
    left, taken = allocator.free_pages[:-need_size], allocator.free_pages[-need_size:]
    allocator.free_pages = left
    return taken


def counts_the_whole_pool(allocator: Any) -> int:
    return int(allocator.size)


def has_used_blocks(allocator: Any) -> Any:
    return torch.cat((allocator.free_pages, allocator.release_pages))[1:]


@pytest.mark.parametrize(
    ("name", "does", "differs"),
    [
        ("get_all_free_pages", has_used_blocks, "other free blocks"),
        ("available_size", counts_the_whole_pool, "other counts of free blocks"),
        ("alloc", hands_out_the_highest, "other allocations"),
        ("alloc", lambda *_: None, "cannot do without blocks"),
        ("free", lambda *_: None, "other freed blocks"),
    ],
)
def test_an_allocator_that_behaves_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, does: Callable[..., Any], differs: str
) -> None:
    monkeypatch.setattr(Own, name, does)
    with pytest.raises(EngineProbeError, match=differs) as refused:
        rank_memory(RankGroup(), Own(SLOTS, StandInPool(SLOTS + 1, width=64)))
    assert "\n" not in str(refused.value)


class OtherViews(StandInPool):
    """A pool whose layers read their keys elsewhere."""

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.k_buffer[layer_id][1:]


class HalfViews(StandInPool):
    """A pool whose layers see half of each slot's values."""

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.v_buffer[layer_id].view(torch.bfloat16).unflatten(1, (2, -1))[:, 0]


class WiderSlots(StandInPool):
    """A pool whose layers take two blocks for one."""

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.v_buffer[layer_id][: SLOTS // 2 * 2].unflatten(0, (-1, 2))


class SharedKeys(StandInPool):
    """A pool whose layers all read the first one's keys."""

    def get_key_buffer(self, layer_id: int) -> Any:
        del layer_id
        return self.k_buffer[0]


@pytest.mark.parametrize(
    ("pool", "refusal"),
    [
        (StandInPool, ""),
        (HalfViews, ""),
        (OtherViews, "block 1 of layer 0 is not at the address"),
        (WiderSlots, "block 1 of layer 0 is not at the address"),
        (SharedKeys, "belongs to no layer"),
    ],
)
def test_layers_have_their_blocks_where_rose_computes_them(
    pool: type[StandInPool], refusal: str
) -> None:
    allocator = TokenToKVPoolAllocator(SLOTS, pool(SLOTS + 1, width=64))
    if not refusal:
        rank_memory(RankGroup(), allocator, "madvise")
        return
    with pytest.raises(EngineProbeError, match=refusal):
        rank_memory(RankGroup(), allocator, "madvise")
