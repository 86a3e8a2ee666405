"""KV lending of a vLLM host: its block pool, and the requests that skip a step on a GPU.

`SkipPolicy` chooses running requests that skip a step because the blocks they need are lent. Stock
vLLM would preempt them, and compute all their tokens again; for a lent block that was already
revoked, that would be wasted. HOLD_NS bounds a hold from its first step on, at about the cost of
computing the request again, whatever comes back meanwhile. The next hold begins only when no
request lacks a block any more.
"""

from collections.abc import Sequence
from typing import Any, Final

from executor.engine_settings import AUTO
from executor.errors import LendingError
from executor.host.kv_lender import HostLender, check_lendable
from executor.kv.capacity_policy import LendingLimits
from executor.vllm.compat import RequestSurface, check_version
from executor.vllm.host.block_pools import CudaLendingPool, HostMemoryLendingPool
from executor.vllm.kv_backing import kv_pages

HOLD_NS: Final = 250_000_000


class SkipPolicy:
    """Chooses the running requests that skip the next step; the clock is passed in."""

    def __init__(self, block_tokens: int, lookahead_tokens: int, step_tokens: int) -> None:
        """step_tokens: the most of one step."""
        self._block_tokens = block_tokens
        self._lookahead = lookahead_tokens
        self._step_tokens = step_tokens
        self._since_ns: int | None = None
        self.short_blocks = 0

    def choose(
        self, now_ns: int, running: Sequence[RequestSurface], free_blocks: int, lent: int
    ) -> frozenset[str]:
        """Return the ids of those that skip the next step, the last ones first, for a bounded time.

        `free_blocks` can be allocated now, `lent` granules are out. `short_blocks`: blocks that all
        of `running` lack together until their present tokens are computed.
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
        """Return the blocks that this many requests can need in one step."""
        each = 1 + -(-self._lookahead // self._block_tokens)
        return running * each + self._step_tokens // self._block_tokens

    def _needs(self, request: RequestSurface) -> tuple[int, int]:
        """Return the blocks for the next step, and for all present tokens."""
        computed = request.num_computed_tokens
        tokens = request.num_tokens_with_spec + request.num_output_placeholders - computed
        has = -(-computed // self._block_tokens)
        step, whole = (
            -(-(computed + count + self._lookahead) // self._block_tokens) - has
            for count in (min(tokens, self._step_tokens), tokens)
        )
        return max(0, step), max(0, whole)


IN_REACH: Final = (
    "use UniProcExecutor, and on a GPU --worker-cls executor.vllm.reserved_worker.ReservedKvWorker"
)


def lender_of(
    scheduler: Any,  # noqa: ANN401 -- vLLM's scheduler
    limits: LendingLimits,
    kv_backend: str = AUTO,
) -> HostLender:
    """Take over the block pool of an engine without requests.

    Raises ExecutorError if its memory cannot be lent.
    """
    check_version()
    if scheduler.connector is not None:
        raise LendingError("a KV connector may read blocks that are free; start without one")
    pages, granules = kv_pages(scheduler.vllm_config, scheduler.kv_cache_config, kv_backend)
    check_lendable(pages, granules, IN_REACH)
    stock = scheduler.kv_cache_manager.block_pool
    block_tokens: int = scheduler.block_size
    if pages.always_restores:
        return HostLender(HostMemoryLendingPool(stock, granules, pages), limits, block_tokens)
    hold = SkipPolicy(
        block_tokens, scheduler.num_lookahead_tokens, scheduler.max_num_scheduled_tokens
    )
    return HostLender(CudaLendingPool(stock, granules, pages), limits, block_tokens, hold)
