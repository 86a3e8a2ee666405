"""A host's KV memory that others may use: lent before it goes idle, taken back when it is needed.

The host asks nobody and waits for nobody: neither guest nor node daemon has a part in this.
"""

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from executor.balloon import plan_growth
from executor.errors import LendingError
from executor.granules import Granules
from executor.lending import LendingCore, LendingLimits
from executor.pages import NoPages, PageBackend
from executor.vllm.kv_storage import kv_pages
from executor.vllm.lent_pool import LentPool
from executor.vllm.settings import AUTO

# Bounds one call, and with it what a request that arrives meanwhile waits for.
MOST_BYTES_A_CALL: Final = 32 << 20
MOST_FORGOTTEN_A_CALL: Final = 4


class KvLent(NamedTuple):
    """What the host section says of lending; nothing from a host that does not lend."""

    granules_total: int = 0
    granules_lent: int = 0
    bytes_lent: int = 0
    reserve_missing: int = 0


class HostLender:
    """Owner of the host's balloon. The engine core's thread alone may call it."""

    def __init__(
        self,
        pool: LentPool,
        limits: LendingLimits,
        block_tokens: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._pool = pool
        self._core = LendingCore(pool.granules, limits)
        self._cold_ns = limits.cold_ns
        self._block_tokens = block_tokens
        self._clock_ns = clock_ns
        self._steps_begun = 0
        self._steps_done = 0
        self._most_a_call = max(1, MOST_BYTES_A_CALL // max(1, pool.granule_bytes))
        # A host that was just started is idle, and all its memory is resident.
        self.pending = True

    @classmethod
    def of(cls, scheduler: Any, limits: LendingLimits, kv_backend: str = AUTO) -> "HostLender":  # noqa: ANN401 -- vLLM's scheduler
        """Take over the block pool of an engine without requests.

        Raises LendingError where its memory cannot be lent.
        """
        if scheduler.connector is not None:
            raise LendingError("a KV connector may read blocks that are free; start without one")
        pages, granules = kv_pages(scheduler.vllm_config, scheduler.kv_cache_config, kv_backend)
        _check(pages, granules)
        pool = LentPool(scheduler.kv_cache_manager.block_pool, granules, pages)
        return cls(pool, limits, scheduler.block_size)

    @property
    def lent(self) -> KvLent:
        """What is lent now."""
        pool = self._pool
        missing = self._core.missing(pool.free)
        return KvLent(pool.granules.count, len(pool.held), pool.pages.bytes_returned, missing)

    def step(self, prefill_tokens: int, requests: int) -> None:
        """Lend or take back; before each schedule, and when a request came.

        `prefill_tokens` of prompts have no place yet; each of `requests` may need one more block.
        """
        if self._pool.failure is not None:
            raise self._pool.failure
        demand = -(-prefill_tokens // self._block_tokens) + requests
        now_ns, free = self._clock_ns(), self._pool.free
        count = self._core.step(now_ns, free, demand, idle=requests == 0)
        wants = self._core.wants(now_ns, free, demand, idle=requests == 0)
        forgotten = self._pool.forget(now_ns, self._cold_ns, MOST_FORGOTTEN_A_CALL if wants else 0)
        if count < 0:
            self._pool.give_back(plan_growth(-count, self._pool.held))
        lent = self._lend(min(count, self._most_a_call)) if count > 0 else 0
        self._pool.unmap(self._steps_done)
        # Fewer than could be lent in one call: there are no more that are wholly free.
        self.pending = bool(forgotten) or lent == self._most_a_call or not self._pool.unmapped

    def step_begun(self) -> None:
        """A step with work was scheduled; until it is done it may touch any block."""
        self._steps_begun += 1

    def step_done(self) -> None:
        """The oldest step in flight was processed."""
        self._steps_done += 1

    def stop(self) -> None:
        """Leave vLLM's own pool behind, with all of its blocks."""
        self.pending = False
        self._pool.dissolve()

    def _lend(self, count: int) -> int:
        return self._pool.take(self._pool.lendable(count), self._steps_begun)


def _check(pages: PageBackend, granules: Granules) -> None:
    if isinstance(pages, NoPages):
        raise LendingError("KV pages are out of this process's reach; use UniProcExecutor")
    if not pages.always_restores:
        raise LendingError(
            "a GPU's memory may be elsewhere when the host needs it; set ROSE_HOST_LEVEL=observe"
        )
    if granules.count <= 2:
        raise LendingError(f"{granules.count} granules leave nothing to lend; give more KV memory")
