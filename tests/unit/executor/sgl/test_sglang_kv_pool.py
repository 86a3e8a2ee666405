"""Granules of SGLang's allocator leave it and come back, whatever the prefix cache has there."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from executor.errors import ExecutorError
from executor.kv.backing import HostPages, NoPages
from executor.kv.shrink_plan import Granules, GranuleUse
from executor.sglang.kv_pool import BalloonedAllocator, kv_pages
from tests.fakes.sglang_scheduler import StandInPool, StandInTree, TokenToKVPoolAllocator

SLOTS, GRANULE = 63, 8


class SglangPoolRig:
    """A pool over stand-ins, and requests that own slots."""

    def __init__(self) -> None:
        self.allocator = TokenToKVPoolAllocator(SLOTS)
        self.tree = StandInTree(self.allocator)
        self.owned: dict[int, Any] = {}
        granules = Granules(SLOTS + 1, GRANULE)
        self.pool = BalloonedAllocator(
            self.allocator, granules, NoPages(4096), self._owned, self._forget
        )

    def _owned(self) -> Any:
        empty = torch.empty(0, dtype=torch.int64)
        return torch.unique(torch.cat([empty, *self.owned.values()]))

    def _forget(self, tokens: int) -> int:
        before = self.allocator.available_size()
        self.tree.evict(SimpleNamespace(num_tokens=tokens))
        return self.allocator.available_size() - before

    def uses(self) -> dict[int, GranuleUse]:
        return {use.granule: use for use in self.pool.uses()}

    def check(self) -> None:
        """No slot is in two places, and none is lost."""
        free = self.allocator.get_all_free_pages().tolist()
        cached = [slot for run in self.tree.runs for slot in run.tolist()]
        owned = self._owned().tolist()
        held = [b for granule in self.pool.held for b in self.pool.granules.blocks_of(granule)]
        everything = sorted([*free, *cached, *owned, *held])
        assert everything == list(range(1, SLOTS + 1)), "each slot has one place"
        assert self.pool.capacity_blocks == SLOTS - len(held)


def test_what_lies_in_a_granule_is_used_cached_or_free() -> None:
    rig = SglangPoolRig()
    rig.owned[0] = rig.allocator.alloc(9)
    rig.tree.keep(rig.allocator.alloc(4))
    uses = rig.uses()
    assert uses[0] == GranuleUse(0, 7, 0), "slot 0 is nobody's"
    assert (uses[1].used, uses[1].cached) == (2, 4)
    assert all(uses[granule].used == uses[granule].cached == 0 for granule in range(2, 8))


def test_a_free_granule_leaves_the_allocator_and_comes_back() -> None:
    rig = SglangPoolRig()
    assert rig.pool.take([6, 7], fence=0) == 2
    rig.check()
    assert rig.allocator.available_size() == SLOTS - 2 * GRANULE
    assert not rig.pool.unmapped
    rig.pool.unmap(steps_done=0)
    assert rig.pool.unmapped
    rig.pool.give_back([6])
    rig.check()
    assert rig.pool.held == {7}


def test_prefixes_are_forgotten_for_a_granule_and_requests_are_not() -> None:
    rig = SglangPoolRig()
    rig.owned[0] = rig.allocator.alloc(7)
    rig.tree.keep(rig.allocator.alloc(16))
    rig.owned[1] = rig.allocator.alloc(1)
    assert rig.pool.take([1, 2, 3], fence=0) == 2, "granule 3 has a request's slot"
    assert rig.pool.held == {1, 2}
    assert not rig.tree.runs
    rig.check()


def test_what_no_one_accounts_for_ends_the_search() -> None:
    rig = SglangPoolRig()
    lost = rig.allocator.alloc(7 + 8)
    assert rig.pool.take([1], fence=0) == 0, "nothing more can be forgotten"
    rig.allocator.free(lost)
    rig.check()


def test_an_allocator_that_begins_anew_has_no_held_granule() -> None:
    rig = SglangPoolRig()
    rig.pool.take([3, 4], fence=0)
    rig.allocator.clear()
    rig.pool.cleared()
    rig.check()


def test_low_blocks_are_handed_out_first_once_granules_have_moved() -> None:
    rig = SglangPoolRig()
    taken = rig.allocator.alloc(30)
    rig.pool.take([7], fence=0)
    rig.allocator.free(taken)
    rig.pool.give_back([7])
    assert rig.allocator.alloc(5).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(5))
def test_no_slot_is_lost_whatever_happens(seed: int) -> None:
    rng, rig = random.Random(seed), SglangPoolRig()
    for step in range(60):
        match rng.randrange(5):
            case 0 if rig.allocator.available_size() > 8:
                rig.owned[step] = rig.allocator.alloc(rng.randint(1, 8))
            case 1 if rig.owned:
                rig.allocator.free(rig.owned.pop(rng.choice(list(rig.owned))))
            case 2 if rig.owned:
                rig.tree.keep(rig.owned.pop(rng.choice(list(rig.owned))))
            case 3:
                rig.pool.take(rng.sample(range(1, 8), 3), fence=step)
            case 4 if rig.pool.held:
                rig.pool.give_back([rng.choice(sorted(rig.pool.held))])
        rig.pool.unmap(step)
        rig.check()


def test_pages_of_a_cache_in_host_memory_are_measured_to_be_gone() -> None:
    allocator = TokenToKVPoolAllocator(8191, StandInPool(8192, width=64))
    pages, granules = kv_pages(allocator)
    assert isinstance(pages, HostPages)
    for tensor in (*allocator.get_kvcache().k_buffer, *allocator.get_kvcache().v_buffer):
        tensor.fill_(1.0)
    kept = granules.blocks_of(0)
    pages.release(range(1, granules.count))
    assert pages.bytes_returned >= 0.9 * pages.bytes_total * (1 - 1 / granules.count)
    keys = allocator.get_kvcache().k_buffer[0]
    assert bool((keys[kept.start : kept.stop] == 1.0).all()), "granule 0 is never touched"


def rows_of_blocks() -> Any:
    """Return a pool whose rows are blocks of several slots, with heads before tokens."""
    rows = [torch.zeros(3, 2, 4, 8)]
    return SimpleNamespace(k_buffer=rows, v_buffer=rows)


@pytest.mark.parametrize(
    "pool",
    [SimpleNamespace(), SimpleNamespace(k_buffer=None, v_buffer=None), rows_of_blocks()],
)
def test_a_cache_of_another_kind_is_left_alone_and_claims_nothing(pool: Any) -> None:
    allocator = TokenToKVPoolAllocator(8, pool)
    pages, _ = kv_pages(allocator)
    assert isinstance(pages, NoPages)
    with pytest.raises(ExecutorError, match="ROSE_KV_BACKEND is madvise"):
        kv_pages(allocator, "madvise")
