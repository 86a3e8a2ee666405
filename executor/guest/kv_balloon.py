"""A guest's KV memory under its grant: shrinks before the next step, grows when allowed."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

from executor.control_page.seqlock_records import Grant
from executor.errors import DeviceMemoryShort
from executor.guest.gate_client import KvMapped
from executor.kv.backing import HeldGranules, PageBackend
from executor.kv.shrink_plan import (
    NO_CAP,
    Rollout,
    cap_in_force,
    granules_over,
    plan_growth,
    plan_shrink,
)
from executor.step_decision import GateLimits

# Bounds one call, so that the engine core still hears aborts while it gives much back.
MOST_BYTES_A_CALL: Final = 512 << 20
# Pause of a guest on a GPU before it asks again for memory that others still have.
GROWTH_RETRY_NS: Final = 100_000_000


class GuestKv:
    """Guest's KV memory under its grant; only the engine core's thread may call it."""

    def __init__(
        self,
        pool: HeldGranules,
        rollouts: Callable[[], Sequence[Rollout]],
        preempt: Callable[[Collection[str]], None],
        limits: GateLimits | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Take over the balloon `pool`.

        rollouts: returns the running requests. preempt: sends requests back to the queue, by their
        ids.
        """
        self._pool = pool
        self._rollouts = rollouts
        self._preempt = preempt
        self._limits = limits or GateLimits()
        self._clock_ns = clock_ns
        self._cap = NO_CAP
        self._steps_begun = 0
        self._steps_done = 0
        self._most_a_call = max(1, MOST_BYTES_A_CALL // max(1, pool.granule_bytes))
        self._grow_after_ns = 0
        self._published = 0, 0

    @property
    def mapped(self) -> KvMapped:
        """KV memory that the guest keeps: mapped granules, and pages held without a mapping."""
        pages, granules = self._pool.pages, self._pool.granules
        return KvMapped(
            pages.bytes_total - pages.bytes_returned,
            min(granules.count, granules.count - len(self._pool.held) + pages.kept),
            granules.count,
            self._pool.granule_bytes,
        )

    @property
    def pages(self) -> PageBackend:
        """Backend of the pages under the KV memory."""
        return self._pool.pages

    @property
    def capacity_blocks(self) -> int:
        """Most blocks that requests can have now, all together."""
        return self._pool.capacity_blocks

    @property
    def ballooned(self) -> bool:
        """True if any granule is out of the pool."""
        return bool(self._pool.held)

    def must_shrink(self, grant: Grant | None) -> bool:
        """Return True if `fit` has something to return or to publish.

        It also reads a lender's messages, since an idle engine does nothing else.
        """
        self._poll()
        pool = self._pool
        unpublished = not pool.pages.settled or self._figures != self._published
        return self._over(grant) > 0 or pool.owed > 0 or unpublished or not pool.unmapped

    def fit(self, grant: Grant | None) -> bool:
        """Shrink or grow towards the grant's cap; return True when nothing more has to go.

        A step may begin only after True. Each call does a bounded part of the work. Raises
        DeviceError or LoanError if a GPU's pages cannot be had or given back, or for a bad message,
        and RankError if a rank of the engine cannot.
        """
        self._poll()
        if owed := self._pool.owed:
            owed -= self._shrink(owed, borrowed=True)
        over = self._over(grant)
        if over > 0:
            over -= self._shrink(over)
        elif over < 0 and not self._pool.pages.owed:
            self._grow(-over)
        self._pool.unmap(self._steps_done)
        self._published = self._figures
        return owed <= 0 and over <= 0 and self._pool.unmapped

    def step_begun(self) -> None:
        """Record that a step with work was scheduled; until it is done it may touch any block."""
        self._steps_begun += 1

    def step_done(self) -> None:
        """Record that the oldest step in flight was processed."""
        self._steps_done += 1

    @property
    def _figures(self) -> tuple[int, int]:
        return self._pool.pages.kept, self._pool.pages.bytes_returned

    def _over(self, grant: Grant | None) -> int:
        self._cap = cap_in_force(grant, self._clock_ns(), self._limits, self._cap)
        return granules_over(self._cap, self._pool.granules, len(self._pool.held))

    def _grow(self, count: int) -> None:
        """Map up to `count` granules, as far as memory is available; wait if that is short."""
        pool, now_ns = self._pool, self._clock_ns()
        if now_ns < self._grow_after_ns and not pool.pages.kept:
            return
        plan = plan_growth(min(count, self._most_a_call), pool.held)
        ready = pool.pages.ready(plan)
        try:
            pool.give_back(plan[:ready])
        except DeviceMemoryShort:
            ready = 0
        if ready < len(plan):
            self._grow_after_ns = now_ns + GROWTH_RETRY_NS

    def _poll(self) -> None:
        # If the device has no room to import them, lent pages go back, and come again.
        with suppress(DeviceMemoryShort):
            self._pool.pages.poll()

    def _shrink(self, over: int, *, borrowed: bool = False) -> int:
        """Take up to `over` granules out of the pool, preempting if need be; return their number.

        borrowed: take only granules on borrowed pages.
        """
        pool = self._pool
        count = min(over, self._most_a_call)
        uses = [use for use in pool.uses() if use.borrowed or not borrowed]
        plan = plan_shrink(count, pool.granules, uses, self._rollouts)
        if plan.preempt:
            self._preempt(plan.preempt)
        return pool.take(plan.granules, self._steps_begun)
