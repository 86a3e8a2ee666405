"""The granule-aware free queue under vLLM's own KVCacheManager."""

import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import kv_cases
import pytest
from kv_cases import BLOCK_TOKENS, NARROW, kv_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from executor.kv.backing import NoPages
from executor.kv.shrink_plan import Granules
from executor.vllm.kv_block_pool import BalloonedPool

GRANULE_BLOCKS = 16


@pytest.fixture(autouse=True)
def none_hash() -> Iterator[None]:
    init_none_hash(sha256)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def manager_of(blocks: int, *, caching: bool = True) -> Any:
    return kv_cases.manager_of(kv_config(blocks, NARROW), caching=caching, most_tokens=8192)


def ballooned(manager: Any, granule_blocks: int = GRANULE_BLOCKS) -> BalloonedPool:
    granules = Granules(manager.block_pool.num_gpu_blocks, granule_blocks)
    return BalloonedPool(manager.block_pool, granules, NoPages(0))


@dataclass
class Session:
    """An agent's conversation: each turn's prompt is all that came before and something new."""

    name: str
    tokens: list[int]
    turns: int = 0
    wakes: int = 0
    ends: int = 0
    request: Any = None


@dataclass
class Load:
    """Multi-turn sessions on a KV cache; time is counted in decode steps."""

    manager: Any
    rng: random.Random
    sessions: int
    turns: int = 6
    think: int = 100
    running: list[Session] = field(default_factory=list)
    resting: list[Session] = field(default_factory=list)
    now: int = 0
    started: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0

    def step(self) -> None:
        """One decode step of all that run; fills up to `sessions`."""
        self.now += 1
        while len(self.running) < self.sessions:
            session = next((s for s in self.resting if s.wakes <= self.now), None)
            if session is not None:
                self.resting.remove(session)
            else:
                session = Session(f"s{self.started}", self._some_tokens(50, 400))
                self.started += 1
            if not self._begin(session):
                break
        for session in list(self.running):
            self._decode(session)

    def _some_tokens(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(90) for _ in range(self.rng.randint(least, most))]

    def _begin(self, session: Session) -> bool:
        session.tokens += self._some_tokens(20, 200)
        parameters = SamplingParams(max_tokens=10_000, ignore_eos=True)
        request = Request(
            f"{session.name}.{session.turns}",
            list(session.tokens),
            parameters,
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        computed, hits, *_ = self.manager.get_computed_blocks(request)
        blocks = self.manager.allocate_slots(
            request, request.num_tokens - hits, hits, new_computed_blocks=computed
        )
        if blocks is None:
            self._rest(session)
            return False
        self.hit_tokens += hits
        self.prompt_tokens += request.num_tokens
        request.num_computed_tokens = request.num_tokens
        session.request = request
        session.ends = self.now + max(8, int(self.rng.expovariate(1 / 150)))
        self.running.append(session)
        return True

    def _decode(self, session: Session) -> None:
        token = self.rng.randrange(90)
        session.tokens.append(token)
        session.request.append_output_token_ids(token)
        fits = self.manager.allocate_slots(session.request, 1) is not None
        session.request.num_computed_tokens += 1
        if not fits or self.now >= session.ends:
            self.finish(session)

    def finish(self, session: Session) -> None:
        self.running.remove(session)
        self.manager.free(session.request)
        session.turns += 1
        if session.turns < self.turns:
            self._rest(session)

    def _rest(self, session: Session) -> None:
        session.wakes = self.now + int(self.rng.expovariate(1 / self.think))
        self.resting.append(session)


def check(manager: Any, balloon: BalloonedPool) -> None:
    """Every block is in exactly one place, and vLLM's counts agree."""
    pool, granules = manager.block_pool, balloon.granules
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    held = [block for granule in balloon.held for block in granules.blocks_of(granule)]
    used = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
    assert not [block for block, times in Counter(free + held + used).items() if times > 1]
    assert sorted(free + held + used) == list(range(1, granules.blocks)), "no block is lost"
    assert pool.get_num_free_blocks() == len(free)
    assert pool.num_gpu_blocks == granules.blocks - len(held)
    assert balloon.capacity_blocks == len(free) + len(used)
    assert pool.get_usage() == pytest.approx(len(used) / max(1, len(free) + len(used)))
    assert 0 not in balloon.held
    assert all(pool.blocks[block].block_hash is None for block in held)
    ids = {i for blocks in pool.cached_block_hash_to_block._cache.values() for i in ids_of(blocks)}
    assert ids.isdisjoint(held), "no prefix leads into a held block"


def ids_of(blocks: Any) -> list[int]:
    return list(blocks) if isinstance(blocks, dict) else [blocks.block_id]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_blocks_are_in_one_place_through_any_sequence(seed: int, caching: bool) -> None:
    rng = random.Random(seed)
    manager = manager_of(300, caching=caching)
    balloon = ballooned(manager, granule_blocks=rng.choice([1, 3, 16]))
    load = Load(manager, rng, sessions=6)
    for _ in range(250):
        act = rng.random()
        if act < 0.6:
            load.step()
        elif act < 0.75:
            granules = rng.sample(range(balloon.granules.count), rng.randint(1, 12))
            balloon.take(sorted(set(granules) - balloon.held), fence=0)
        elif act < 0.9 and balloon.held:
            balloon.give_back(rng.sample(sorted(balloon.held), rng.randint(1, len(balloon.held))))
        elif act < 0.95:
            manager.evict_blocks(set(rng.sample(range(1, 300), 20)))
        elif load.running:
            load.finish(rng.choice(load.running))
        check(manager, balloon)
    assert not manager.reset_prefix_cache() or not load.running
    while load.running:
        load.finish(load.running[0])
    assert manager.reset_prefix_cache(), "held blocks do not count as used"
    assert not any(use.cached for use in balloon.uses())
    check(manager, balloon)


def test_prefixes_are_found_and_forgotten_as_with_the_stock_queue() -> None:
    manager = manager_of(60)
    ballooned(manager, granule_blocks=4)
    load = Load(manager, random.Random(0), sessions=1, turns=100, think=1)
    while load.started < 2 and load.now < 1_500:
        load.step()
    assert load.hit_tokens > 0.5 * load.prompt_tokens


def test_a_fresh_pool_hands_out_one_granule_after_the_other() -> None:
    manager = manager_of(65)
    balloon = ballooned(manager)
    pool = manager.block_pool
    first = pool.get_new_blocks(20)
    assert len({balloon.granules.of(block.block_id) for block in first}) <= 3
    pool.free_blocks(first[:7])
    again = {balloon.granules.of(block.block_id) for block in pool.get_new_blocks(3)}
    assert again <= {balloon.granules.of(block.block_id) for block in first}, "holes come first"


def test_a_block_that_is_not_free_cannot_be_removed() -> None:
    manager = manager_of(33)
    balloon = ballooned(manager)
    queue = manager.block_pool.free_block_queue
    (block,) = manager.block_pool.get_new_blocks(1)
    with pytest.raises(RuntimeError, match="not free"):
        queue.remove(block)
    balloon.take([1, 2], fence=0)
    held = manager.block_pool.blocks[20]
    with pytest.raises(RuntimeError, match="not free"):
        manager.block_pool.touch([held])
    rest = manager.block_pool.get_num_free_blocks()
    assert len({block.block_id for block in manager.block_pool.get_new_blocks(rest)}) == rest
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()


def test_the_queue_can_be_walked_from_any_block_on() -> None:
    manager = manager_of(40)
    ballooned(manager, granule_blocks=8)
    queue = manager.block_pool.free_block_queue
    blocks = queue.get_all_free_blocks()
    assert list(queue.iter_blocks_after(blocks[10])) == blocks[11:]
    plain = queue.num_plain_blocks
    queue.remove(blocks[3])
    queue.append(blocks[3])
    assert queue.num_plain_blocks == plain, "a block without a hash has nothing to be kept for"
    queue.remove(blocks[3])
    blocks[3]._block_hash = b"prefix"
    queue.append(blocks[3])
    assert queue.get_all_free_blocks()[-1] is blocks[3]
    assert queue.num_plain_blocks == plain - 1


def measured(manager: Any, load: Load, granules: Granules) -> tuple[float, float]:
    """Return the mean share of granules without a used block, and the share of cached tokens."""
    shares = []
    for _ in range(2_500):
        load.step()
        if load.now > 500 and load.now % 25 == 0:
            busy = {granules.of(b.block_id) for b in manager.block_pool.blocks if b.ref_cnt}
            shares.append(1 - len(busy - {0}) / (granules.count - 1))
    return sum(shares) / len(shares), load.hit_tokens / load.prompt_tokens


@pytest.mark.parametrize(("sessions", "turns"), [(10, 6), (20, 1)])
def test_far_more_granules_are_wholly_free_than_with_the_stock_queue(
    sessions: int, turns: int
) -> None:
    figures = {}
    for kind in ("stock", "granules"):
        manager = manager_of(1_600)
        if kind == "granules":
            ballooned(manager)
        load = Load(manager, random.Random(1), sessions, turns=turns)
        figures[kind] = measured(manager, load, Granules(1_600, GRANULE_BLOCKS))
    assert figures["granules"][0] > 2 * figures["stock"][0]
    assert figures["granules"][0] > 0.15
    assert figures["granules"][1] > figures["stock"][1] - 0.02, "prefixes are not the price"
