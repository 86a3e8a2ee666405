"""vLLM's block pool with granules of blocks that can leave it and come back.

`GranuleQueue` is the free queue. Stock vLLM hands out free blocks in the order of their last use,
wherever they lie: then a half-free pool has hardly one granule without a block in use. Here blocks
come

    1. without cached content, from the granule with the fewest free blocks
    2. with cached content, from the fullest granule among the COLD_SHARE least recently freed ones

so that prefixes are still evicted roughly in the order of their last use.

`BalloonedPool` takes granules out of the pool. A held granule's blocks are in no queue and in no
cache, and the pool counts itself smaller by them, so that vLLM's own accounting (usage, reset of
the prefix cache) stays right.
"""

import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Final, Generic, TypeVar

from executor.errors import ExecutorError
from executor.kv.backing import HeldGranules, PageBackend
from executor.kv.shrink_plan import Granules, GranuleUse
from executor.vllm.compat import TESTED, BlockPoolSurface, BlockSurface
from executor.vllm.probes import replace_queue

COLD_SHARE: Final = 1 / 8
# Bounds the work of one allocation in a large pool.
MOST_COLD: Final = 64

_CALL: Final = re.compile(r"free_block_queue\.(\w+)")
Block = TypeVar("Block", bound=BlockSurface)


class GranuleQueue(Generic[Block]):
    """Free queue of KV blocks, ordered by granules (runs of blocks), in vLLM's queue's place.

    It has the methods of FreeKVCacheBlockQueue.
    """

    def __init__(self, granules: Granules, blocks: Sequence[Block]) -> None:
        self._granules = granules
        self._plain: list[dict[int, Block]] = [{} for _ in range(granules.count)]
        self._cached: list[dict[int, Block]] = [{} for _ in range(granules.count)]
        # Granules that have plain blocks, by their number of free blocks of both kinds.
        self._by_free: list[dict[int, None]] = [{} for _ in range(granules.granule_blocks + 1)]
        # Granules that have cached blocks, ordered by the last return of one, with the time of that
        # return by the clock in `now_ns`.
        self._recency: OrderedDict[int, int] = OrderedDict()
        self.now_ns = 0
        self.num_free_blocks = 0
        self.num_plain_blocks = 0
        self.prepend_n(blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Add free blocks without cached content."""
        for block in blocks:
            self._add(self._plain, block)

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Add free blocks whose content may be requested again: those that have a hash.

        vLLM 0.27 appends all blocks where prefix caching is off.
        """
        for block in blocks:
            if block.block_hash is None:
                self._add(self._plain, block)
                continue
            self._add(self._cached, block)
            granule = self._granules.of(block.block_id)
            self._recency[granule] = self.now_ns
            self._recency.move_to_end(granule)

    def append(self, block: Block) -> None:
        """Add one free block, as `append_n` does."""
        self.append_n([block])

    def popleft(self) -> Block:
        """Remove and return the block to use next. Raises ValueError if there is none."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        """Remove and return the `n` blocks to use next; there must be so many."""
        assert self.num_free_blocks >= n
        popped: list[Block] = []
        while len(popped) < n:
            for block in list(islice(self._next_source(), n - len(popped))):
                self.remove(block)
                popped.append(block)
        return popped

    def remove(self, block: Block) -> None:
        """Remove a free block from the queue. Raises RuntimeError if it is not free."""
        number, granule = block.block_id, self._granules.of(block.block_id)
        plain, cached = self._plain[granule], self._cached[granule]
        if number not in plain and number not in cached:
            raise RuntimeError(f"remove() called on a block that is not free: {block}")
        self._by_free[self.free_in(granule)].pop(granule, None)
        if plain.pop(number, None) is not None:
            self.num_plain_blocks -= 1
        else:
            del cached[number]
            if not cached:
                del self._recency[granule]
        self._sort_in(granule)
        self.num_free_blocks -= 1

    def get_all_free_blocks(self) -> list[Block]:
        """Return all free blocks, roughly in the order of their use."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """Yield the free blocks behind `cursor`, roughly in the order of their use; None: all."""
        plain = (self._plain[granule] for bucket in self._by_free for granule in bucket)
        cached = (self._cached[granule] for granule in self._recency)
        blocks = (block for group in (*plain, *cached) for block in group.values())
        if cursor is not None:
            for block in blocks:
                if block is cursor:
                    break
        yield from blocks

    def free_in(self, granule: int) -> int:
        """Return the number of free blocks in a granule, plain and cached."""
        return len(self._plain[granule]) + len(self._cached[granule])

    def cached_in(self, granule: int) -> int:
        """Return the number of free blocks in a granule whose content may be requested again."""
        return sum(block.block_hash is not None for block in self._cached[granule].values())

    def empty_granules(self) -> list[int]:
        """Return the numbers of full-size granules with all blocks free, none of them cached."""
        return list(filter(self.is_empty, self._by_free[self._granules.granule_blocks]))

    def is_empty(self, granule: int) -> bool:
        """Return True for a full-size granule with all blocks free, none of them cached."""
        return len(self._plain[granule]) == self._granules.granule_blocks

    def take(self, granule: int) -> list[Block]:
        """Remove and return all free blocks of a granule."""
        plain, cached = self._plain[granule], self._cached[granule]
        blocks = [*plain.values(), *cached.values()]
        self._by_free[len(blocks)].pop(granule, None)
        self._recency.pop(granule, None)
        self.num_plain_blocks -= len(plain)
        plain.clear()
        cached.clear()
        self.num_free_blocks -= len(blocks)
        return blocks

    def cold_granules(self, before_ns: int, most: int) -> list[int]:
        """Return up to `most` numbers of wholly free granules whose prefixes are all cold.

        No block with a prefix was freed into them since `before_ns`.
        """
        if not most:
            return []
        cold = takewhile(lambda entry: entry[1] < before_ns, self._recency.items())
        seen = islice(cold, MOST_COLD)
        size = self._granules.granule_blocks
        return list(islice((g for g, _ in seen if self.free_in(g) == size), most))

    def make_plain(self, granule: int) -> list[Block]:
        """Count a granule's cached blocks as plain; return them, for the caller to evict."""
        plain, cached = self._plain[granule], self._cached[granule]
        blocks = list(cached.values())
        plain.update(cached)
        cached.clear()
        self.num_plain_blocks += len(blocks)
        del self._recency[granule]
        self._sort_in(granule)
        return blocks

    def _next_source(self) -> Iterable[Block]:
        for bucket in self._by_free:
            if bucket:
                return self._plain[next(iter(bucket))].values()
        cold = max(1, min(MOST_COLD, int(len(self._recency) * COLD_SHARE)))
        fullest = min(islice(self._recency, cold), key=lambda granule: len(self._cached[granule]))
        return self._cached[fullest].values()

    def _add(self, kind: list[dict[int, Block]], block: Block) -> None:
        granule = self._granules.of(block.block_id)
        self._by_free[self.free_in(granule)].pop(granule, None)
        kind[granule][block.block_id] = block
        self._sort_in(granule)
        self.num_free_blocks += 1
        self.num_plain_blocks += kind is self._plain

    def _sort_in(self, granule: int) -> None:
        if self._plain[granule]:
            self._by_free[self.free_in(granule)][granule] = None


def _check_calls(pool: type, queue: object) -> None:
    """Raise ExecutorError if a class of pools uses a name of its free queue that `queue` lacks."""
    source = inspect.getsource(sys.modules[pool.__module__])
    for name in _CALL.findall(source):
        if not hasattr(queue, name):
            raise ExecutorError(
                f"this vLLM's block pool uses {name} of its free queue, which ROSE's does not"
                f" have; install one of {', '.join(TESTED)}"
            )


class BalloonedPool(HeldGranules):
    """Balloon over vLLM's block pool: takes granules (runs of blocks) out and puts them back.

    It replaces the pool's free queue by a GranuleQueue.
    """

    def __init__(self, pool: BlockPoolSurface, granules: Granules, pages: PageBackend) -> None:
        self._pool = pool
        self._queue = self._queue_of(granules, pool.free_block_queue.get_all_free_blocks())
        _check_calls(type(pool), self._queue)
        replace_queue(pool, self._queue)
        super().__init__(granules, pages)

    @property
    def capacity_blocks(self) -> int:
        """Most blocks that requests can have now, all together."""
        return self._pool.num_gpu_blocks - 1  # The null block is nobody's.

    def uses(self) -> Iterator[GranuleUse]:
        """Yield the number of used and cached blocks of each mapped granule."""
        for granule in range(self.granules.count):
            if granule not in self.held:
                used = self._blocks_in(granule) - self._queue.free_in(granule)
                cached = self._queue.cached_in(granule)
                yield GranuleUse(granule, used, cached, self.pages.borrowed(granule))

    def _queue_of(
        self, granules: Granules, blocks: list[BlockSurface]
    ) -> GranuleQueue[BlockSurface]:
        return GranuleQueue(granules, blocks)

    def _wholly_free(self, granules: Collection[int]) -> list[int]:
        return [granule for granule in granules if self._empty(granule)]

    def _take_out(self, granules: Collection[int]) -> None:
        for granule in granules:
            self._remove(granule)

    def _put_in(self, granules: Collection[int]) -> None:
        for granule in granules:
            self._insert(granule)

    def _remove(self, granule: int) -> None:
        blocks = self._queue.take(granule)
        cached = {block.block_id for block in blocks if block.block_hash is not None}
        if cached:
            self._pool.evict_blocks(cached)
        self._pool.num_gpu_blocks -= len(blocks)

    def _insert(self, granule: int) -> None:
        blocks = self._blocks_of(granule)
        self._queue.prepend_n(blocks)
        self._pool.num_gpu_blocks += len(blocks)

    def _blocks_of(self, granule: int) -> list[BlockSurface]:
        return [self._pool.blocks[number] for number in self.granules.blocks_of(granule)]

    def _empty(self, granule: int) -> bool:
        blocks = len(self.granules.blocks_of(granule))
        return granule not in self.held and self._queue.free_in(granule) == blocks

    def _blocks_in(self, granule: int) -> int:
        return len(self.granules.blocks_of(granule)) - (granule == self.granules.of(0))
