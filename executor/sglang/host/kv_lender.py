"""KV lending of an SGLang host on host memory: its allocator, granules of which are lent.

To SGLang the pool stays as large as it was: it admits, retracts and reports as it would without
lending. An allocation that the free blocks do not cover takes lent granules back by itself, before
it fails; before any prefix is evicted, too, since SGLang counts lent blocks as free. Their pages
come with the first touch.

A prefix without a hit for a long time is dropped, so that its memory can be lent. SGLang offers no
such time. The tokens that requests had in that time are known, and the prefix cache drops the least
recently used first: cached tokens beyond that number are cold.
"""

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

from executor.engine_settings import AUTO
from executor.errors import LendingError
from executor.host.kv_lender import HostLender, HostMemoryPool, check_lendable
from executor.kv.backing import HeldGranules, PageBackend
from executor.kv.lending import KvFree, LendingLimits
from executor.kv.shrink_plan import Granules, KvGroup
from executor.sglang.compat import LENDING_NEEDED, check_features
from executor.sglang.kv_pool import BalloonedAllocator, Forget, kv_pages

# A search for free granules looks at every free block, so one that found too few is not repeated in
# every step.
SEARCH_NS: Final = 100_000_000
IN_REACH: Final = "run SGLang on host memory, with a model that has keys and values of each layer"
ALLOCATORS: Final = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")


class WarmTokens:
    """Sliding sum of the tokens of recently ended requests."""

    def __init__(self) -> None:
        self._ended: deque[tuple[int, int]] = deque()
        self._sum = 0

    def add(self, now_ns: int, tokens: int) -> None:
        """Add the tokens of a request that ended at `now_ns`."""
        self._ended.append((now_ns, tokens))
        self._sum += tokens

    def since(self, ns: int) -> int:
        """Return the tokens of requests that ended at `ns` or later; forget older ones."""
        while self._ended and self._ended[0][0] < ns:
            self._sum -= self._ended.popleft()[1]
        return self._sum


class LendingAllocator(BalloonedAllocator, HostMemoryPool):
    """Ballooned pool of a host on SGLang whose held granules are lent, and count as free."""

    def __init__(
        self,
        allocator: Any,  # noqa: ANN401 -- SGLang's
        granules: Granules,
        pages: PageBackend,
        evictable_tokens: Callable[[], int],
        forget: Forget,
    ) -> None:
        """Take over the allocator.

        evictable_tokens: returns the number of the prefix cache's tokens that no request holds.
        """
        self.lent_blocks = 0
        self._evictable_tokens = evictable_tokens
        self._page_tokens = int(allocator.page_size)
        self._sorted_before = bool(allocator.need_sort)
        self._out: set[int] = set()
        self._now_ns = self._search_ns = 0
        self.warm = WarmTokens()
        super().__init__(allocator, granules, pages, lambda: allocator.free_pages[:0], forget)

    @property
    def free(self) -> KvFree:
        """Blocks that no request uses, plain and cached, and lent granules."""
        allocator = self._allocator
        staged = getattr(allocator, "num_staged_pages", None)
        plain = len(allocator.free_pages)
        plain += len(allocator.release_pages) if staged is None else staged
        return KvFree(plain, self._evictable_tokens() // self._page_tokens, len(self.held))

    def owns(self, allocator: Any) -> bool:  # noqa: ANN401 -- SGLang's
        """Return True if `allocator` is the one that this pool lends from."""
        return allocator is self._allocator

    def lendable(self, count: int) -> list[int]:
        """Return up to `count` free granules to lend: the highest, so that they stay together.

        After a search that found too few, return [] for SEARCH_NS.
        """
        if self._now_ns < self._search_ns:
            return []
        found = sorted(self._wholly_free(range(self.granules.count)), reverse=True)
        if len(found) <= count:
            self._search_ns = self._now_ns + SEARCH_NS
        return found[:count]

    def take(self, granules: Collection[int], fence: int) -> int:
        """Take those granules that are wholly free out of the pool; return their number.

        No prefix is dropped for it.
        """
        return HeldGranules.take(self, granules, fence)

    def short_of(self, tokens: int) -> bool:
        """Take lent granules back for an allocation of `tokens`; return False if none was lent.

        After True the allocation is worth another try.
        """
        if not self._out:
            return False
        blocks = max(1, -(-tokens // self._page_tokens) - self.free.plain)
        self._take_back_blocks(blocks)
        return True

    def forget(self, now_ns: int, cold_ns: int, most: int) -> int:
        """Drop cached prefixes of up to `most` granules' size without a hit in `cold_ns`.

        Returns the number of granules; call it in every step, since it also tells the time.
        """
        self._now_ns = now_ns
        if not most:
            return 0
        cold = self._evictable_tokens() - self.warm.since(now_ns - cold_ns)
        tokens = min(cold, most * self.granules.granule_blocks * self._page_tokens)
        blocks = self._forget(tokens) if tokens > 0 else 0
        return -(-blocks // self.granules.granule_blocks)

    def cleared(self) -> None:
        """Take lent blocks out of an allocator that was cleared and has all blocks again."""
        out, self._out, self.lent_blocks = self._out, set(), 0
        self._take_out(out)

    def dissolve(self) -> None:
        """Restore SGLang's own pool with all of its blocks, from any state of this one."""
        self._put_in(set(self._out))
        self._allocator.need_sort = self._sorted_before

    def _take_out(self, granules: Collection[int]) -> None:
        super()._take_out(granules)
        self._out.update(granules)
        self.lent_blocks += self._blocks(granules)

    def _put_in(self, granules: Collection[int]) -> None:
        if granules:
            super()._put_in(granules)
            self._out.difference_update(granules)
            self.lent_blocks -= self._blocks(granules)

    def _blocks(self, granules: Collection[int]) -> int:
        return sum(len(self.granules.blocks_of(granule)) for granule in granules)


def lender_of(
    scheduler: Any,  # noqa: ANN401 -- SGLang's scheduler
    limits: LendingLimits,
    kv_backend: str = AUTO,
) -> tuple[HostLender, LendingAllocator]:
    """Return a lender over the allocator of an engine without requests, and its pool.

    Raises ExecutorError if the memory cannot be lent.
    """
    check_features(scheduler.server_args, LENDING_NEEDED, "a host that lends")
    allocator = scheduler.token_to_kv_pool_allocator
    if type(allocator).__name__ not in ALLOCATORS:
        raise LendingError(
            f"ROSE does not know a {type(allocator).__name__}; start the host with a model of"
            " plain attention"
        )
    pages, granules = kv_pages(allocator, kv_backend)
    check_lendable(pages, granules, IN_REACH)
    tree = scheduler.tree_cache

    def forget(tokens: int) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        before = pool.free.plain
        tree.evict(EvictParams(num_tokens=tokens))
        return pool.free.plain - before

    pool = LendingAllocator(allocator, granules, pages, tree.evictable_size, forget)
    return HostLender(pool, limits, [KvGroup(int(allocator.page_size))]), pool
