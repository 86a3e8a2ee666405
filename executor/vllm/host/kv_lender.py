"""KV lending of a vLLM host: its block pool, and the requests that skip a step on a GPU.

`SkipPolicy` chooses running requests that skip a step because the blocks they need are lent. Stock
vLLM would preempt them, and compute all their tokens again; for a lent block that was already
revoked, that would be wasted. HOLD_NS bounds a hold from its first step on, at about the cost of
computing the request again, whatever comes back meanwhile. The next hold begins only when no
request lacks a block any more.

`LendingPool` is a ballooned pool whose held granules are lent. On host memory lent blocks stay free
blocks to vLLM: it admits, preempts and reports as it would without lending. An allocation that
plain blocks do not cover takes lent granules back by itself, before any prefix is evicted. Their
pages come with the first touch. On a GPU a lent block is not free: another process may still use
its pages when it is needed. So it is not in the queue, and vLLM counts it neither as free nor as
used. Free blocks have their pages.
"""

from collections.abc import Callable, Sequence
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
from executor.kv.shrink_plan import Granules, KvGroup, blocks_in
from executor.vllm.compat import BlockPoolSurface, BlockSurface, RequestSurface, check_version
from executor.vllm.kv_backing import kv_groups, kv_pages
from executor.vllm.kv_block_pool import BalloonedPool, Block, GranuleQueue
from executor.vllm.probes import check_addresses
from executor.vllm.surfaces import LENDING

IN_REACH: Final = (
    "use UniProcExecutor, over several ranks --worker-cls executor.vllm.cpu_worker.CpuKvWorker, and"
    " on a GPU --worker-cls executor.vllm.reserved_worker.ReservedKvWorker"
)


class LendingPool(BalloonedPool, LendablePool):
    """Pool of a vLLM host whose granules (runs of KV blocks) can be held and lent."""

    def __init__(self, pool: BlockPoolSurface, granules: Granules, pages: PageBackend) -> None:
        self._stock = type(pool.free_block_queue)
        self._sorted: list[int] = []
        super().__init__(pool, granules, pages)

    def lendable(self, count: int) -> list[int]:
        """Return up to `count` free granules to lend: the highest, so that they stay together.

        Some that became free lately may be left out until all others are lent.
        """
        found = self._next_lendable(count)
        if len(found) < count:
            # A large pool has thousands, and a step waits for each call: sorted once for many.
            self._sorted = sorted(set(self._queue.empty_granules()).difference(found))
            found += self._next_lendable(count - len(found))
        return found

    def _next_lendable(self, count: int) -> list[int]:
        found: list[int] = []
        while self._sorted and len(found) < count:
            if self._queue.is_empty(granule := self._sorted.pop()):
                found.append(granule)
        return found

    def forget(self, now_ns: int, cold_ns: int, most: int) -> int:
        """Drop the prefixes in up to `most` granules that had no hit in the last `cold_ns`.

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
        """Restore vLLM's own free queue with all free blocks, from any state of this one."""
        free = [block for block in self._pool.blocks if block.ref_cnt == 0 and not block.is_null]
        free.sort(key=lambda block: block.block_hash is not None)
        self._pool.free_block_queue = self._stock(free)  # type: ignore[call-arg] # vLLM's class


class LendingQueue(GranuleQueue[Block]):
    """Free queue by granules whose lent blocks count as free."""

    def __init__(
        self, granules: Granules, blocks: Sequence[Block], short_of: Callable[[int], None]
    ) -> None:
        """Create the queue with these free blocks.

        short_of: called with an allocation's number of missing plain blocks; it takes lent ones
        back.
        """
        super().__init__(granules, blocks)
        self.lent_blocks = 0
        self._short_of = short_of

    def popleft_n(self, n: int) -> list[Block]:
        """Remove and return the `n` blocks to use next, taking lent ones back if need be."""
        if self.lent_blocks and n > self.num_plain_blocks:
            self._short_of(n - self.num_plain_blocks)
        return super().popleft_n(n)

    def lend(self, granule: int) -> None:
        """Take a granule's blocks out of the queue; they still count as free."""
        blocks = len(self.take(granule))
        self.lent_blocks += blocks
        self.num_free_blocks += blocks

    def back(self, blocks: Sequence[Block]) -> None:
        """Put lent blocks into the queue again."""
        self.lent_blocks -= len(blocks)
        self.num_free_blocks -= len(blocks)
        self.prepend_n(blocks)


class HostMemoryLendingPool(LendingPool, HostMemoryPool):
    """Lending pool on host memory; to vLLM it stays as large as it was."""

    _queue: LendingQueue[BlockSurface]

    @property
    def free(self) -> KvFree:
        """Counts of plain and of cached blocks that no request uses, and of lent granules."""
        queue = self._queue
        cached = queue.num_free_blocks - queue.lent_blocks - queue.num_plain_blocks
        return KvFree(queue.num_plain_blocks, cached, len(self.held))

    def _queue_of(
        self, granules: Granules, blocks: list[BlockSurface]
    ) -> LendingQueue[BlockSurface]:
        return LendingQueue(granules, blocks, self._take_back_blocks)

    def _remove(self, granule: int) -> None:
        self._queue.lend(granule)

    def _insert(self, granule: int) -> None:
        self._queue.back(self._blocks_of(granule))


class CudaLendingPool(LendingPool, DevicePool):
    """Lending pool on a GPU; to vLLM it is smaller by the lent blocks."""

    @property
    def free(self) -> KvFree:
        """Counts of plain and of cached blocks that no request uses, and of lent granules."""
        plain = self._queue.num_plain_blocks
        return KvFree(plain, self._queue.num_free_blocks - plain, len(self.held))

    @property
    def blocks_away(self) -> int:
        """Number of blocks in lent granules."""
        return len(self._pool.blocks) - self._pool.num_gpu_blocks


class SkipPolicy:
    """Policy that chooses running requests to skip a step while blocks that they need are lent.

    The clock is passed in. A hold lasts HOLD_NS at most, from its first step on.
    """

    def __init__(self, groups: Sequence[KvGroup], lookahead_tokens: int, step_tokens: int) -> None:
        """Begin with nothing held.

        groups: layers that share a block table. step_tokens: the most tokens of one step.
        """
        self._groups = groups
        self._lookahead = lookahead_tokens
        self._step_tokens = step_tokens
        self._since_ns: int | None = None
        self.short_blocks = 0

    def choose(
        self, now_ns: int, running: Sequence[RequestSurface], free_blocks: int, lent: int
    ) -> frozenset[str]:
        """Return the ids of the running requests that skip the next step; none after HOLD_NS.

        Earlier ones of `running` get blocks first. `free_blocks` can be allocated now, `lent`
        granules are out. Sets `short_blocks`: blocks that all of `running` lack together until
        their present tokens are computed.
        """
        if not lent or free_blocks >= self._most(len(running)):
            return self._nobody()
        held, left, lacking = [], free_blocks, -free_blocks
        for request in running:
            next_step, whole = self._needs(request)
            lacking += whole
            if next_step <= left:
                left -= next_step
            else:
                held.append(request.request_id)
        self.short_blocks = max(0, lacking)
        if not held:
            self._since_ns = None
            return frozenset()
        if self._since_ns is None:
            self._since_ns = now_ns
        return frozenset(held if now_ns - self._since_ns < HOLD_NS else ())

    def _nobody(self) -> frozenset[str]:
        self._since_ns, self.short_blocks = None, 0
        return frozenset()

    def _most(self, running: int) -> int:
        """Return the most blocks that this many requests can need in one step."""
        return sum(
            running * (1 + -(-self._lookahead // group.block_tokens))
            + self._step_tokens // group.block_tokens
            for group in self._groups
        )

    def _needs(self, request: RequestSurface) -> tuple[int, int]:
        """Return the new blocks that a request needs for its next step, and for all its tokens."""
        computed = request.num_computed_tokens
        tokens = request.num_tokens_with_spec + request.num_output_placeholders - computed
        has = blocks_in(self._groups, computed)
        step, whole = (
            blocks_in(self._groups, computed + count + self._lookahead) - has
            for count in (min(tokens, self._step_tokens), tokens)
        )
        return max(0, step), max(0, whole)


def lender_of(
    scheduler: Any,  # noqa: ANN401 -- vLLM's scheduler
    limits: LendingLimits,
    kv_backend: str = AUTO,
) -> HostLender:
    """Return a lender over the block pool of an engine without requests.

    Raises ExecutorError if the memory cannot be lent.
    """
    check_version(LENDING)
    if scheduler.connector is not None:
        raise LendingError("a KV connector may read blocks that are free; start without one")
    pages, granules = kv_pages(scheduler.vllm_config, scheduler.kv_cache_config, kv_backend)
    check_lendable(pages, granules, IN_REACH)
    check_addresses(scheduler.vllm_config, scheduler.kv_cache_config, pages)
    stock = scheduler.kv_cache_manager.block_pool
    groups = kv_groups(scheduler.vllm_config, scheduler.kv_cache_config)
    if pages.always_restores:
        return HostLender(HostMemoryLendingPool(stock, granules, pages), limits, groups)
    hold = SkipPolicy(groups, scheduler.num_lookahead_tokens, scheduler.max_num_scheduled_tokens)
    return HostLender(CudaLendingPool(stock, granules, pages), limits, groups, hold)
