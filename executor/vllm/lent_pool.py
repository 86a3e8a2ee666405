"""A host's block pool over host memory, of which free granules are lent.

To vLLM lent blocks are free ones: what it admits, preempts and reports is what it would without
lending. An allocation that plain blocks do not cover takes lent granules back by itself, before any
prefix is forgotten; on host memory their pages come with the first touch.
"""

from collections.abc import Callable, Collection, Sequence

from executor.balloon import plan_growth
from executor.granules import Granules
from executor.lending import KvFree
from executor.pages import PageBackend
from executor.vllm.granule_queue import Block, GranuleQueue
from executor.vllm.host_pool import HostPool
from executor.vllm.surfaces import BlockSurface, FullBlockPoolSurface


class LendingQueue(GranuleQueue[Block]):
    """A granule queue whose lent blocks count as free."""

    def __init__(
        self, granules: Granules, blocks: Sequence[Block], short_of: Callable[[int], None]
    ) -> None:
        """`short_of` is told how many plain blocks an allocation lacks; it takes lent ones back."""
        super().__init__(granules, blocks)
        self.lent_blocks = 0
        self._short_of = short_of

    def popleft_n(self, n: int) -> list[Block]:
        """Remove and return the `n` blocks to use next."""
        if self.lent_blocks and n > self.num_plain_blocks:
            self._short_of(n - self.num_plain_blocks)
        return super().popleft_n(n)

    def lend(self, granule: int) -> None:
        """Take a granule's blocks out, to be had again."""
        blocks = len(self.take(granule))
        self.lent_blocks += blocks
        self.num_free_blocks += blocks

    def back(self, blocks: Sequence[Block]) -> None:
        """Put lent blocks in again."""
        self.lent_blocks -= len(blocks)
        self.num_free_blocks -= len(blocks)
        self.prepend_n(blocks)


class LentPool(HostPool):
    """A pool that stays as large as it was."""

    _queue: LendingQueue[BlockSurface]

    def __init__(self, pool: FullBlockPoolSurface, granules: Granules, pages: PageBackend) -> None:
        # What went wrong in an allocation, where nothing may: the blocks came back, the memory
        # under them may be counted wrong.
        self._failure: Exception | None = None
        super().__init__(pool, granules, pages)

    @property
    def free(self) -> KvFree:
        """What no request uses."""
        queue = self._queue
        cached = queue.num_free_blocks - queue.lent_blocks - queue.num_plain_blocks
        return KvFree(queue.num_plain_blocks, cached, len(self.held))

    def take_back(self, count: int) -> int:
        """Have the lowest `count` lent granules again: all of them come."""
        granules = plan_growth(count, self.held)
        self.give_back(granules)
        return len(granules)

    def check(self) -> None:
        """Raise what went wrong in an allocation."""
        if self._failure is not None:
            raise self._failure

    def give_back(self, granules: Collection[int]) -> None:
        """Have granules again: first their blocks, which a host must never lack."""
        for granule in granules:
            self._insert(granule)
            self.held.remove(granule)
            self._touchable.pop(granule, None)
        self.pages.restore(granules)

    def _short_of(self, blocks: int) -> None:
        try:
            self.take_back(-(-blocks // self.granules.granule_blocks))
        except Exception as error:  # noqa: BLE001 -- vLLM's allocation must not see it
            self._failure = error

    def _queue_of(
        self, granules: Granules, blocks: list[BlockSurface]
    ) -> LendingQueue[BlockSurface]:
        return LendingQueue(granules, blocks, self._short_of)

    def _remove(self, granule: int) -> None:
        self._queue.lend(granule)

    def _insert(self, granule: int) -> None:
        self._queue.back(self._blocks_of(granule))
