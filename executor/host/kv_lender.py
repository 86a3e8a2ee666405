"""KV lending of a host: lends free granules, takes them back on demand, skips requests meanwhile.

The host waits for no other process: neither guest nor node daemon has a part in this. On host
memory it takes granules back without asking. On a GPU pages come back when their borrowers return
them:

    lends ── stop, or a failure ──> retires ── the last page is back ──> over
    lends, retires ── addresses may be without memory ──> lost: nothing moves any more

The pool and the policy of skipped requests are the engine's; this module knows neither.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple, Protocol

from executor.errors import DeviceError, LendingError, LoanError, MappingLost, RankError
from executor.kv.backing import HeldGranules, NoPages, PageBackend
from executor.kv.lending import KvFree, LendingCore, LendingLimits
from executor.kv.shrink_plan import Granules, KvGroup, blocks_in, plan_growth

LEAST_GRANULES: Final = 3

# Bounds one call, and with it the wait of a request that arrives meanwhile.
MOST_BYTES_A_CALL: Final = 32 << 20
MOST_FORGOTTEN_A_CALL: Final = 4
# Time for which an idle host takes empty steps while no requested page comes back, and no lendable
# page is taken.
AWAKE_NS: Final = 250_000_000
# Longest time for which running requests wait for lent blocks that are on their way back: about the
# cost of computing a request again.
HOLD_NS: Final = 250_000_000
# Pause of a host that lends no more after the driver refused a call.
RETRY_NS: Final = 100_000_000
# Time for which an idle host that lends no more takes empty steps for pages that are still out: a
# guest that keeps them is ended by its node's ladder before that. Later the next request takes them
# back.
RETIRE_NS: Final = 15_000_000_000


class KvLent(NamedTuple):
    """Lending fields of the host section; all 0 for a host that does not lend."""

    granules_total: int = 0
    granules_lent: int = 0
    bytes_lent: int = 0
    reserve_missing: int = 0


class LendablePool(HeldGranules):
    """Balloon over an engine's pool of KV blocks that can be lent by granules, runs of blocks."""

    @property
    @abstractmethod
    def free(self) -> KvFree:
        """Blocks that no request uses, plain and cached, and lent granules."""

    @property
    def blocks_away(self) -> int:
        """Number of lent blocks that the engine does not count as its own."""
        return 0

    @abstractmethod
    def lendable(self, count: int) -> list[int]:
        """Return up to `count` free granules to lend: the highest, so that they stay together."""

    @abstractmethod
    def take_back(self, count: int) -> int:
        """Take back up to `count` lent granules; return the number that came back at once."""

    @abstractmethod
    def forget(self, now_ns: int, cold_ns: int, most: int) -> int:
        """Drop cached prefixes of up to `most` granules that had no hit in the last `cold_ns`.

        Returns the number of granules; call it in every step, since it also tells the time.
        """

    @abstractmethod
    def dissolve(self) -> None:
        """Restore the engine's own pool with all of its blocks, from any state of this one."""

    def check(self) -> None:
        """Raise the error of an earlier call that could not raise it; return if there is none."""


class HostMemoryPool(LendablePool):
    """Pool on host memory: lent granules come back at once, even inside an allocation."""

    # Error in an allocation, which must not raise: the blocks came back, but the memory under them
    # may be counted wrong.
    _failure: Exception | None = None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def take_back(self, count: int) -> int:
        """Take back the lowest `count` lent granules; return their number: all of them come."""
        granules = plan_growth(count, self.held)
        self.give_back(granules)
        return len(granules)

    def give_back(self, granules: Collection[int]) -> None:
        """Put these granules back: first their blocks, which a host must never lack, then pages."""
        if not granules:
            return
        self._put_in(granules)
        self.held.difference_update(granules)
        for granule in granules:
            self._touchable.pop(granule, None)
        self.pages.restore(granules)

    def _take_back_blocks(self, blocks: int) -> None:
        """Take back granules of at least `blocks` blocks for an allocation.

        An error is kept for `check`, since the engine's allocation must not see it.
        """
        try:
            self.take_back(-(-blocks // self.granules.granule_blocks))
        except Exception as error:  # noqa: BLE001 -- the engine's allocation must not see it
            self._failure = error


class DevicePool(LendablePool):
    """Pool on a GPU: lent granules come back once their pages do."""

    def take_back(self, count: int) -> int:
        """Take back up to `count` granules that have pages now; return their number.

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


class Holder(Protocol):
    """Policy that lets running requests skip steps while lent blocks are on their way back.

    `short_blocks`: blocks that the running requests lack together.
    """

    short_blocks: int

    def choose(
        self, now_ns: int, running: Sequence[Any], free_blocks: int, lent: int
    ) -> frozenset[str]:
        """Return the ids of the running requests that skip the next step; empty for none."""
        ...


class HostLender:
    """Lender of a host's KV memory: moves granules (runs of blocks) out of its engine's pool and
    back.

    Only the engine core's thread may call it.
    """

    def __init__(
        self,
        pool: LendablePool,
        limits: LendingLimits,
        groups: Sequence[KvGroup],
        hold: Holder | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Take over the pool.

        groups: layers that share a block table. hold: policy for a pool whose lent blocks do not
        come back at once; None on host memory.
        """
        self.pool = pool
        self._core = LendingCore(pool.granules, limits)
        self._cold_ns = limits.cold_ns
        self._groups = groups
        self._hold = hold
        self.clock_ns = clock_ns
        self._steps_begun = 0
        self._steps_done = 0
        self._most_a_call = max(1, MOST_BYTES_A_CALL // max(1, pool.granule_bytes))
        self._wanted = 0
        self._moved_ns = 0
        self._moved = 0, 0
        self._retires = self._lost = False
        self._retry_ns = 0
        self._retires_until_ns = 0
        # A host that was just started is idle, and all its memory is resident.
        self.pending = True

    @property
    def reserve(self) -> int:
        """Number of granules that are never lent."""
        return self._core.reserve

    @property
    def lent(self) -> KvLent:
        """Present loan for the host section; granules wanted back count as missing reserve."""
        pool = self.pool
        missing = max(self._core.missing(pool.free), self._wanted)
        # Measured, so noise may make it negative.
        returned = max(0, pool.pages.bytes_returned)
        return KvLent(self._core.count, len(pool.held), returned, missing)

    @property
    def blocks_away(self) -> int:
        """Number of lent blocks that the engine's pool does not count."""
        return self.pool.blocks_away

    @property
    def over(self) -> bool:
        """True if lending was stopped and the engine's own pool is restored."""
        return self._retires and not self._lost and not self.pool.held

    def step(self, prefill_tokens: int, requests: int, next_tokens: int = 0) -> None:
        """Lend or take back granules; call it before each schedule.

        `prefill_tokens` of prompts have no place yet; each of `requests` may need one more block a
        group; the one that waits longest needs a place for `next_tokens`. Raises DeviceError,
        LoanError or RankError.
        """
        if self._retires:
            self._retire()
            return
        self.pool.check()
        demand = self._demand(prefill_tokens, requests, next_tokens)
        now_ns, free, idle = self.clock_ns(), self.pool.free, requests == 0
        count = self._core.step(now_ns, free, demand, idle=idle)
        wants = self._core.wants(now_ns, free, demand, idle=idle)
        forgotten = self.pool.forget(now_ns, self._cold_ns, MOST_FORGOTTEN_A_CALL if wants else 0)
        self._take_back(max(0, -count))
        lent = self._lend(min(count, self._most_a_call)) if count > 0 else 0
        self.pool.unmap(self._steps_done)
        awaits = count >= 0 and self.pool.pages.poll()
        # Fewer than one call's bound means that no more granules are wholly free.
        self.pending = bool(forgotten) or lent == self._most_a_call or not self.pool.unmapped
        self.pending |= self._awake(now_ns, awaits=awaits or self._wanted > 0)

    def arrived(self, prefill_tokens: int, requests: int) -> bool:
        """Take back the memory that a new request will need; return True if any is needed."""
        if self._retires:
            return False
        now_ns, free = self.clock_ns(), self.pool.free
        demand = self._demand(prefill_tokens, requests, 0)
        count = self._core.step(now_ns, free, demand, idle=False)
        self._take_back(max(0, -count))
        return count < 0

    def held_back(self, running: Sequence[Any]) -> frozenset[str]:
        """Return the ids of running requests that skip the step that is scheduled now."""
        if self._hold is None:
            return frozenset()
        free = self.pool.free
        return self._hold.choose(
            self.clock_ns(), running, free.plain + free.cached, 0 if self._lost else free.lent
        )

    def step_begun(self) -> None:
        """Record that a step with work was scheduled; until it is done it may touch any block."""
        self._steps_begun += 1

    def step_done(self) -> None:
        """Record that the oldest step in flight was processed."""
        self._steps_done += 1

    def stop(self, why: Exception | None = None) -> None:
        """Stop lending, and restore the engine's own pool with all of its blocks.

        On a GPU that takes until the lent pages are back: call `step` until `over`. why: the error,
        if one is the cause.
        """
        self._retires = True
        self._retires_until_ns = self.clock_ns() + RETIRE_NS
        self._lost |= isinstance(why, MappingLost)
        self._wanted = len(self.pool.held)
        if self._hold is None:
            self.pool.held.clear()  # On host memory lent blocks have memory all the same.
        if not self.pool.held:
            self.pool.dissolve()
        # Pages come back only on a call, so an idle host keeps calling.
        self.pending = bool(self.pool.held) and not self._lost

    def _retire(self) -> None:
        now_ns = self.clock_ns()
        self.pending = not (self._lost or self.over) and now_ns < self._retires_until_ns
        if self._lost or self.over or now_ns < self._retry_ns:
            return
        pool = self.pool
        try:
            pool.pages.recall(len(pool.held))
            pool.pages.poll()
            pool.take_back(len(pool.held))
        except MappingLost:
            self._lost = True
        except (DeviceError, LoanError, RankError):
            self._retry_ns = now_ns + RETRY_NS
        self._wanted = len(pool.held)
        self.pending &= bool(pool.held) and not self._lost
        if not pool.held:
            pool.dissolve()

    def _demand(self, prefill_tokens: int, requests: int, next_tokens: int) -> int:
        """Return the number of blocks that requests will allocate soon."""
        queued = blocks_in(self._groups, max(prefill_tokens, next_tokens), max(1, requests))
        short = self._hold.short_blocks if self._hold is not None else 0
        return max(queued, short) + requests * len(self._groups)

    def _take_back(self, count: int) -> None:
        pool = self.pool
        if count or self._wanted:
            pool.pages.recall(count)
        missing = 0
        if count:
            pool.pages.poll()  # After the recall: what came back just now is not to be lent again.
            missing = count - pool.take_back(count)
            pool.pages.recall(missing)
        self._wanted = missing

    def _awake(self, now_ns: int, *, awaits: bool) -> bool:
        """Return True for AWAKE_NS after the last change of the loan, while `awaits` is True.

        Empty steps may then wait for the other processes.
        """
        moved = len(self.pool.held), self.pool.pages.bytes_returned
        if moved != self._moved or not awaits:
            self._moved, self._moved_ns = moved, now_ns
        return awaits and now_ns - self._moved_ns < AWAKE_NS

    def _lend(self, count: int) -> int:
        return self.pool.take(self.pool.lendable(count), self._steps_begun)


def check_lendable(pages: PageBackend, granules: Granules, instead: str) -> None:
    """Raise LendingError unless the pages can be returned and LEAST_GRANULES exist.

    instead: the advice in the error.
    """
    if isinstance(pages, NoPages):
        raise LendingError(f"KV pages are out of this process's reach; {instead}")
    if granules.count < LEAST_GRANULES:
        raise LendingError(f"{granules.count} granules leave nothing to lend; give more KV memory")
