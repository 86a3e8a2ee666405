"""Block pools of a lending host: on host memory and on a GPU.

`LendingPool` is the part that both share: a ballooned pool whose held granules are lent.

On host memory lent blocks stay free blocks to vLLM: it admits, preempts and reports as it would
without lending. An allocation that plain blocks do not cover takes lent granules back by itself,
before any prefix is evicted. Their pages come with the first touch.

On a GPU a lent block is not free: another process may still use its pages when it is needed. So it
is not in the queue, and vLLM counts it neither as free nor as used. Free blocks have their pages.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Final

from executor.kv.backing import PageBackend
from executor.kv.capacity_policy import KvFree
from executor.kv.shrink_plan import Granules, plan_growth
from executor.vllm.compat import BlockPoolSurface, BlockSurface
from executor.vllm.kv_block_pool import BalloonedPool, Block, GranuleQueue


class LendingPool(BalloonedPool):
    """A ballooned pool whose held granules are lent."""

    def __init__(self, pool: BlockPoolSurface, granules: Granules, pages: PageBackend) -> None:
        self._stock = type(pool.free_block_queue)
        super().__init__(pool, granules, pages)

    @property
    @abstractmethod
    def free(self) -> KvFree:
        """Blocks that no request uses."""

    @property
    def blocks_away(self) -> int:
        """Lent blocks that the pool does not count."""
        return 0

    @abstractmethod
    def take_back(self, count: int) -> int:
        """Take back up to `count` lent granules; return how many came at once."""

    def check(self) -> None:
        """Raise an error recorded earlier in a place that could not report it."""

    def lendable(self, count: int) -> list[int]:
        """Return up to `count` granules to lend: the highest, so that they stay together."""
        return sorted(self._queue.empty_granules(), reverse=True)[:count]

    def forget(self, now_ns: int, cold_ns: int, most: int) -> int:
        """Drop the prefixes in up to `most` granules without a hit in the last `cold_ns`.

        Returns the number of granules; call it in every step, since it also tells the queue the
        time.
        """
        self._queue.now_ns = now_ns
        granules = self._queue.cold_granules(now_ns - cold_ns, most)
        for granule in granules:
            blocks = self._queue.make_plain(granule)
            self._pool.evict_blocks({block.block_id for block in blocks})
        return len(granules)

    def dissolve(self) -> None:
        """Restore the stock pool, whole, from any state of this one."""
        free = [block for block in self._pool.blocks if block.ref_cnt == 0 and not block.is_null]
        free.sort(key=lambda block: block.block_hash is not None)
        self._pool.free_block_queue = self._stock(free)  # type: ignore[call-arg] # vLLM's class


class LendingQueue(GranuleQueue[Block]):
    """A granule queue whose lent blocks count as free."""

    def __init__(
        self, granules: Granules, blocks: Sequence[Block], short_of: Callable[[int], None]
    ) -> None:
        """short_of: called with an allocation's missing plain blocks; it takes lent ones back."""
        super().__init__(granules, blocks)
        self.lent_blocks = 0
        self._short_of = short_of

    def popleft_n(self, n: int) -> list[Block]:
        """Remove and return the `n` blocks to use next."""
        if self.lent_blocks and n > self.num_plain_blocks:
            self._short_of(n - self.num_plain_blocks)
        return super().popleft_n(n)

    def lend(self, granule: int) -> None:
        """Take a granule's blocks out; they can be had again."""
        blocks = len(self.take(granule))
        self.lent_blocks += blocks
        self.num_free_blocks += blocks

    def back(self, blocks: Sequence[Block]) -> None:
        """Put lent blocks in again."""
        self.lent_blocks -= len(blocks)
        self.num_free_blocks -= len(blocks)
        self.prepend_n(blocks)


class HostMemoryLendingPool(LendingPool):
    """A lending pool on host memory; to vLLM it stays as large as it was."""

    _queue: LendingQueue[BlockSurface]

    def __init__(self, pool: BlockPoolSurface, granules: Granules, pages: PageBackend) -> None:
        # Error in an allocation, which must not raise: the blocks came back, the memory under them
        # may be
        # counted wrong.
        self._failure: Exception | None = None
        super().__init__(pool, granules, pages)

    @property
    def free(self) -> KvFree:
        """Blocks that no request uses."""
        queue = self._queue
        cached = queue.num_free_blocks - queue.lent_blocks - queue.num_plain_blocks
        return KvFree(queue.num_plain_blocks, cached, len(self.held))

    def take_back(self, count: int) -> int:
        """Take back the lowest `count` lent granules: all of them come."""
        granules = plan_growth(count, self.held)
        self.give_back(granules)
        return len(granules)

    def check(self) -> None:
        """Raise an error recorded in an allocation."""
        if self._failure is not None:
            raise self._failure

    def give_back(self, granules: Collection[int]) -> None:
        """Take granules back: first their blocks, which a host must never lack."""
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


# Bounds the wait of one step for the driver.
MOST_BYTES_A_CALL: Final = 32 << 20


class CudaLendingPool(LendingPool):
    """A lending pool on a GPU; to vLLM it shrinks by the lent blocks."""

    @property
    def free(self) -> KvFree:
        """Blocks that no request uses."""
        plain = self._queue.num_plain_blocks
        return KvFree(plain, self._queue.num_free_blocks - plain, len(self.held))

    @property
    def blocks_away(self) -> int:
        """Blocks of lent granules."""
        return len(self._pool.blocks) - self._pool.num_gpu_blocks

    def take_back(self, count: int) -> int:
        """Take back up to `count` granules, as far as there are pages for them now.

        First those whose pages never went; of the others no more than MOST_BYTES_A_CALL. Raises
        DeviceError, and changed nothing then beyond the first kind.
        """
        here = plan_growth(count, self._touchable)
        self.give_back(here)
        most = max(1, MOST_BYTES_A_CALL // max(1, self.granule_bytes))
        away = plan_growth(min(count - len(here), most), self.held)
        away = away[: self.pages.ready(away)] if away else away
        self.give_back(away)
        return len(here) + len(away)
