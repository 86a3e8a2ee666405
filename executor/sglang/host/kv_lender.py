"""KV lending of an SGLang host: its allocator, granules of which are lent.

On host memory the pool stays as large as it was to SGLang: it admits, retracts and reports as it
would without lending. An allocation that the free blocks do not cover takes lent granules back by
itself, before it fails; before any prefix is evicted, too, since SGLang counts lent blocks as free.
Their pages come with the first touch.

On a GPU another process may still use a lent block's pages when it is needed. So it counts neither
as free nor as used, and a decode for which blocks are missing waits while lent ones come back:
SGLang would retract requests, and compute all their tokens again.

A prefix without a hit for a long time is dropped, so that its memory can be lent. SGLang offers no
such time. The tokens that requests had in that time are known, and the prefix cache drops the least
recently used first: cached tokens beyond that number are cold.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from executor.engine_settings import AUTO
from executor.errors import LendingError
from executor.host.kv_lender import (
    HOLD_NS,
    DevicePool,
    HostLender,
    HostMemoryPool,
    LendablePool,
    check_lendable,
)
from executor.kv.backing import PageBackend
from executor.kv.lending import KvFree, LendingLimits
from executor.kv.rank_pages import RankPager
from executor.kv.shrink_plan import Granules, KvGroup
from executor.rank_group import RankGroup
from executor.sglang.compat import LENDING_NEEDED, check_features
from executor.sglang.kv_pool import BalloonedAllocator, ChangeKind, Forget, PoolChange
from executor.sglang.ranks import rank_memory

# A search for free granules looks at every free block, so one that found too few is not repeated in
# every step.
SEARCH_NS: Final = 100_000_000
IN_REACH: Final = (
    "run a model that has keys and values of each layer, and on a GPU set ROSE_KV_BACKEND=cuda"
)
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


class DecodeHold:
    """Policy by which a decode waits while blocks that it needs are lent; the clock is passed in.

    SGLang decodes all running requests in a step, so all wait. A hold lasts HOLD_NS at most; the
    last request's as long as anything is lent, since SGLang would abort it. The next one begins
    only when no block is missing any more.
    """

    short_blocks = 0

    def __init__(self) -> None:
        self._since_ns: int | None = None

    def choose(
        self, now_ns: int, running: Sequence[Any], free_blocks: int, lent: int
    ) -> frozenset[str]:
        """Return no request: a decode waits as a whole, by `waits`."""
        del now_ns, running, free_blocks, lent
        return frozenset()

    def waits(self, now_ns: int, requests: int) -> bool:
        """Return True if a decode of so many requests, which lacks blocks, is to wait."""
        if self._since_ns is None:
            self._since_ns = now_ns
        return requests == 1 or now_ns - self._since_ns < HOLD_NS

    def over(self) -> None:
        """Record that a decode lacks no block."""
        self._since_ns = None


class LendingAllocator(BalloonedAllocator, LendablePool):
    """Ballooned pool of a host on SGLang whose held granules are lent.

    `hold`: policy of decodes that lack blocks, None if lent blocks come back at once.
    """

    hold: DecodeHold | None = None

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

    @property
    def counted_tokens(self) -> int:
        """Lent tokens that SGLang counts as free."""
        return 0

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
        return self._take(granules, fence)

    def short_of(self, tokens: int) -> bool:
        """Take lent granules back for an allocation of `tokens`; return False if none came.

        After True the allocation is worth another try.
        """
        del tokens
        return False

    def forget(self, now_ns: int, cold_ns: int, most: int) -> int:
        """Drop cached prefixes of up to `most` granules' size without a hit in `cold_ns`.

        Returns the number of granules; call it in every step, since it also tells the time.
        """
        self._now_ns = now_ns
        if not most:
            return 0
        cold = self._evictable_tokens() - self.warm.since(now_ns - cold_ns)
        tokens = min(cold, most * self.granules.granule_blocks * self._page_tokens)
        blocks = self._drop(tokens) if tokens > 0 else 0
        return -(-blocks // self.granules.granule_blocks)

    def cleared(self) -> None:
        """Take lent blocks out of an allocator that was cleared and has all blocks again."""
        out, self._out, self.lent_blocks = self._out, set(), 0
        self._take_out(out)

    def dissolve(self) -> None:
        """Restore SGLang's own pool with all of its blocks, from any state of this one."""
        self.note(PoolChange(ChangeKind.DISSOLVE))
        self._put_in(set(self._out))
        self.held.clear()
        self._allocator.need_sort = self._sorted_before

    def follow(self, change: PoolChange) -> None:
        """Make a change of the pool that another rank made."""
        if change.kind is ChangeKind.DISSOLVE:
            self.dissolve()
        super().follow(change)

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


class HostMemoryLendingAllocator(LendingAllocator, HostMemoryPool):
    """Lending pool on host memory; to SGLang it stays as large as it was."""

    @property
    def counted_tokens(self) -> int:
        return self.lent_blocks * self._page_tokens

    def short_of(self, tokens: int) -> bool:
        if not self._out:
            return False
        blocks = max(1, -(-tokens // self._page_tokens) - self.free.plain)
        self._take_back_blocks(blocks)
        return True


class CudaLendingAllocator(LendingAllocator, DevicePool):
    """Lending pool on a GPU; to SGLang it is smaller by the lent blocks."""

    def __init__(self, checker: Any, *a: Any) -> None:  # noqa: ANN401 -- SGLang's
        """Take over the allocator.

        checker: SGLang's check that no block was lost, which has to know the pool's size.
        """
        self._checker = checker
        self._whole_tokens = int(checker.max_total_num_tokens)
        self.hold = DecodeHold()
        super().__init__(*a)

    @property
    def blocks_away(self) -> int:
        """Number of blocks in lent granules."""
        return self.lent_blocks

    def _take_out(self, granules: Collection[int]) -> None:
        super()._take_out(granules)
        self._tell_size()

    def _put_in(self, granules: Collection[int]) -> None:
        super()._put_in(granules)
        self._tell_size()

    def _tell_size(self) -> None:
        lent_tokens = self.lent_blocks * self._page_tokens
        self._checker.max_total_num_tokens = self._whole_tokens - lent_tokens


def check_scheduler(scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's scheduler
    """Raise ExecutorError if the memory of an engine of this kind cannot be lent."""
    check_features(scheduler.server_args, LENDING_NEEDED, "a host that lends")
    allocator = scheduler.token_to_kv_pool_allocator
    if type(allocator).__name__ not in ALLOCATORS:
        raise LendingError(
            f"ROSE does not know a {type(allocator).__name__}; start the host with a model of"
            " plain attention"
        )


def lending_pool(
    scheduler: Any,  # noqa: ANN401 -- SGLang's scheduler
    ranks: RankGroup,
    kv_backend: str = AUTO,
) -> tuple[LendingAllocator, RankPager | None]:
    """Return the lending pool over the allocator of an engine without requests, and its pager.

    All ranks call it. Raises ExecutorError, on all of them, if the memory cannot be lent.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    memory = rank_memory(
        ranks,
        allocator,
        kv_backend,
        lambda pages, granules: check_lendable(pages, granules, IN_REACH),
    )
    tree = scheduler.tree_cache

    def forget(tokens: int) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        before = pool.free.plain
        tree.evict(EvictParams(num_tokens=tokens))
        return pool.free.plain - before

    given = allocator, memory.granules, memory.pages, tree.evictable_size, forget
    pool: LendingAllocator = (
        HostMemoryLendingAllocator(*given)
        if memory.pages.always_restores
        else CudaLendingAllocator(scheduler.invariant_checker, *given)
    )
    return pool, memory.pager


def lender_of(pool: LendingAllocator, limits: LendingLimits, page_tokens: int) -> HostLender:
    """Return the lender over a pool, which decides for all ranks."""
    return HostLender(pool, limits, [KvGroup(page_tokens)], pool.hold)
