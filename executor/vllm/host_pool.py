"""vLLM's block pool of which a host lends free granules: what all kinds of memory share."""

from abc import abstractmethod

from executor.granules import Granules
from executor.lending import KvFree
from executor.pages import PageBackend
from executor.vllm.ballooned_pool import BalloonedPool
from executor.vllm.surfaces import FullBlockPoolSurface


class HostPool(BalloonedPool):
    """A ballooned pool whose held granules are lent."""

    def __init__(self, pool: FullBlockPoolSurface, granules: Granules, pages: PageBackend) -> None:
        self._stock = type(pool.free_block_queue)
        super().__init__(pool, granules, pages)

    @property
    @abstractmethod
    def free(self) -> KvFree:
        """What no request uses."""

    @property
    def blocks_away(self) -> int:
        """Lent blocks that the pool does not count."""
        return 0

    @abstractmethod
    def take_back(self, count: int) -> int:
        """Have up to `count` lent granules again, and return how many came at once."""

    def check(self) -> None:
        """Raise what went wrong where nobody could be told."""

    def lendable(self, count: int) -> list[int]:
        """Up to `count` granules to lend: the highest, so that the lent ones stay together."""
        return sorted(self._queue.empty_granules(), reverse=True)[:count]

    def forget(self, now_ns: int, cold_ns: int, most: int) -> int:
        """Forget the prefixes in up to `most` granules that nobody asked for in the last `cold_ns`.

        Returns in how many; to be called in every step, since it also tells the queue the time.
        """
        self._queue.now_ns = now_ns
        granules = self._queue.cold_granules(now_ns - cold_ns, most)
        for granule in granules:
            blocks = self._queue.make_plain(granule)
            self._pool.evict_blocks({block.block_id for block in blocks})
        return len(granules)

    def dissolve(self) -> None:
        """Leave the stock pool behind, whole, whatever state this one is in."""
        free = [block for block in self._pool.blocks if block.ref_cnt == 0 and not block.is_null]
        free.sort(key=lambda block: block.block_hash is not None)
        self._pool.free_block_queue = self._stock(free)  # type: ignore[call-arg] # vLLM's class
