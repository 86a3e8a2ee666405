"""A guest's KV memory under its grant: shrinks before the next step, grows when told to."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from executor.control_page.seqlock_records import Grant
from executor.errors import DeviceMemoryShort
from executor.guest.gate_client import KvMapped
from executor.kv.backing import GranulePool
from executor.kv.shrink_plan import (
    NO_CAP,
    GranuleUse,
    Rollout,
    cap_in_force,
    granules_over,
    plan_growth,
    plan_shrink,
)
from executor.step_decision import GateLimits

# Bounds one call, so that the engine core still hears aborts while it gives much back.
MOST_BYTES_A_CALL: Final = 512 << 20
# How long a guest on a GPU waits for memory that others still have before it asks again.
GROWTH_RETRY_NS: Final = 100_000_000


class BalloonedPool(GranulePool, Protocol):
    """An engine's KV block pool that granules can leave."""

    @property
    def capacity_blocks(self) -> int:
        """Blocks that requests can have at most now."""
        ...

    @property
    def owed(self) -> int:
        """How many borrowed granules must still be taken."""
        ...

    def uses(self) -> Iterable[GranuleUse]:
        """What lies in each mapped granule."""
        ...

    def take(self, granules: Collection[int], fence: int) -> int:
        """Hold those of the granules that can be emptied without preempting, and return how many.

        Their pages stay until `unmap` is told that step `fence` is done.
        """
        ...

    def give_back(self, granules: Collection[int]) -> None:
        """Map held granules again: first their pages, then their blocks."""
        ...


class SizedRequest(Protocol):
    """What is asked of a request: its id, and its tokens of prompt and output so far."""

    @property
    def request_id(self) -> str:
        """Under which its scheduler knows it."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        ...


def too_large(
    requests: Iterable[SizedRequest],
    capacity_blocks: int,
    blocks_of: Callable[[int], int],
    lookahead: int,
) -> list[str]:
    """Return ids of the requests whose tokens so far do not fit, were they alone in the guest.

    What a request may still generate does not count: it may stop before that, and its tokens are
    with its client already. `blocks_of` says how many blocks so many tokens need.
    """
    return [
        request.request_id
        for request in requests
        if blocks_of(request.num_tokens + lookahead) > capacity_blocks
    ]


class GuestKv:
    """Owner of the balloon. The engine core's thread alone may call it."""

    def __init__(
        self,
        pool: BalloonedPool,
        rollouts: Callable[[], Sequence[Rollout]],
        preempt: Callable[[Collection[str]], None],
        limits: GateLimits | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`rollouts`: the running requests; `preempt` sends some of them back to the queue."""
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
        self._kept = 0

    @property
    def mapped(self) -> KvMapped:
        """KV memory of this guest: mapped granules, and pages that it keeps without a mapping. The
        host may ask for both."""
        pages, granules = self._pool.pages, self._pool.granules
        return KvMapped(
            pages.bytes_total - pages.bytes_returned,
            min(granules.count, granules.count - len(self._pool.held) + pages.kept),
            granules.count,
            self._pool.granule_bytes,
        )

    @property
    def capacity_blocks(self) -> int:
        """Blocks that requests can have at most now."""
        return self._pool.capacity_blocks

    @property
    def ballooned(self) -> bool:
        """Whether any granule is held."""
        return bool(self._pool.held)

    def must_shrink(self, grant: Grant | None) -> bool:
        """Whether granules have to be taken, or pages to be returned, before the next step.

        Also hears a lender: nobody else does in an idle engine. What it sent has to be told.
        """
        self._poll()
        pool = self._pool
        changed = pool.pages.kept != self._kept
        return self._over(grant) > 0 or pool.owed > 0 or changed or not pool.unmapped

    def fit(self, grant: Grant | None) -> bool:
        """Work towards what the grant allows; True when nothing more has to go.

        A step may begin only after True. Each call does a bounded part of the work. Raises
        DeviceError or LoanError where a GPU's pages cannot be had, given back or understood.
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
        self._kept = self._pool.pages.kept
        return owed <= 0 and over <= 0 and self._pool.unmapped

    def step_begun(self) -> None:
        """A step with work was scheduled; until it is done it may touch any block."""
        self._steps_begun += 1

    def step_done(self) -> None:
        """The oldest step in flight was processed."""
        self._steps_done += 1

    def _over(self, grant: Grant | None) -> int:
        self._cap = cap_in_force(grant, self._clock_ns(), self._limits, self._cap)
        return granules_over(self._cap, self._pool.granules, len(self._pool.held))

    def _grow(self, count: int) -> None:
        """Growing may have to wait, for nobody owes a guest memory: what there is comes now."""
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
        # Where the device has no room to import them, lent pages go back, and come again.
        with suppress(DeviceMemoryShort):
            self._pool.pages.poll()

    def _shrink(self, over: int, *, borrowed: bool = False) -> int:
        """Take up to so many granules, `borrowed` ones only; returns how many."""
        pool = self._pool
        count = min(over, self._most_a_call)
        uses = [use for use in pool.uses() if use.borrowed or not borrowed]
        plan = plan_shrink(count, pool.granules, uses, self._rollouts)
        if plan.preempt:
            self._preempt(plan.preempt)
        return pool.take(plan.granules, self._steps_begun)
