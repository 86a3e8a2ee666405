"""vLLM's block pool with granules that can leave it and come back.

A held granule's blocks are in no queue and in no cache, and the pool counts itself smaller by
them, so that vLLM's own accounting (usage, reset of the prefix cache) stays right.
"""

from collections.abc import Collection, Iterator

from executor.balloon import GranuleUse
from executor.granules import Granules
from executor.pages import PageBackend
from executor.vllm.granule_queue import GranuleQueue
from executor.vllm.surfaces import BlockSurface, FullBlockPoolSurface


class BalloonedPool:
    """Takes the place of the pool's free queue; `fence` counts the engine's steps."""

    def __init__(self, pool: FullBlockPoolSurface, granules: Granules, pages: PageBackend) -> None:
        self._pool = pool
        self._queue = self._queue_of(granules, pool.free_block_queue.get_all_free_blocks())
        pool.free_block_queue = self._queue
        self.granules = granules
        self.pages = pages
        self.held: set[int] = set()
        self._touchable: dict[int, int] = {}
        for granule in pages.released:
            self._remove(granule)
            self.held.add(granule)

    @property
    def granule_bytes(self) -> int:
        """KV bytes of a whole granule."""
        return self.pages.bytes_total // self.granules.blocks * self.granules.granule_blocks

    @property
    def capacity_blocks(self) -> int:
        """Blocks that requests can have at most now."""
        return self._pool.num_gpu_blocks - 1  # The null block is nobody's.

    @property
    def unmapped(self) -> bool:
        """Whether the pages of all held granules were returned."""
        return not self._touchable

    @property
    def owed(self) -> int:
        """Granules to take, of those on borrowed pages, beyond those whose pages are on their way
        back: their owner wants them."""
        owed = self.pages.owed
        return owed and max(0, owed - sum(map(self.pages.borrowed, self._touchable)))

    def uses(self) -> Iterator[GranuleUse]:
        """What lies in each mapped granule."""
        for granule in range(self.granules.count):
            if granule not in self.held:
                used = self._blocks_in(granule) - self._queue.free_in(granule)
                cached = self._queue.cached_in(granule)
                yield GranuleUse(granule, used, cached, self.pages.borrowed(granule))

    def take(self, granules: Collection[int], fence: int) -> int:
        """Hold those of the granules that are wholly free, and return how many.

        Their pages stay until `unmap` is told that step `fence` is done: it may read or write them.
        """
        taken = [granule for granule in granules if self._empty(granule)]
        for granule in taken:
            self._remove(granule)
            self.held.add(granule)
            self._touchable[granule] = fence
        return len(taken)

    def unmap(self, steps_done: int) -> None:
        """Return the pages that no step after the first `steps_done` can touch any more."""
        due = [granule for granule, fence in self._touchable.items() if fence <= steps_done]
        if due:
            self.pages.release(due)
            for granule in due:
                del self._touchable[granule]

    def give_back(self, granules: Collection[int]) -> None:
        """Map held granules again: first their pages, then their blocks."""
        self.pages.restore(granules)
        for granule in granules:
            self._insert(granule)
            self.held.remove(granule)
            self._touchable.pop(granule, None)

    def _queue_of(
        self, granules: Granules, blocks: list[BlockSurface]
    ) -> GranuleQueue[BlockSurface]:
        return GranuleQueue(granules, blocks)

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
