"""Shrink plans of the KV balloon: which granules of KV blocks a guest gives back or gets back.

A granule is a run of KV blocks that is taken from a guest, and given back to it, as a whole.

    mapped ── take ──> held        pages go back once no step in flight can touch them
    held ── give back ──> mapped   pages are there again before the blocks re-enter the pool

Free granules go first. If they are too few, `empty_cheapest` picks the rollouts to preempt that
cost least to recompute.

Granule 0 holds vLLM's null block and is never taken, so the tightest cap is 1. A cap of 0 means
that none is set: zeroed memory and a node without KV policy leave the guest as large as it started.
"""

import heapq
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from executor.control_page.seqlock_records import Grant
from executor.step_decision import GateLimits, lapsed

NO_CAP: Final = 0


@dataclass(frozen=True, slots=True)
class Granules:
    """Division of `blocks` KV blocks into granules of `granule_blocks`; the last may be shorter."""

    blocks: int
    granule_blocks: int

    def __post_init__(self) -> None:
        if self.blocks <= 0 or self.granule_blocks <= 0:
            raise ValueError("blocks and granule_blocks must be positive")

    @property
    def count(self) -> int:
        """Number of granules."""
        return -(-self.blocks // self.granule_blocks)

    def of(self, block: int) -> int:
        """Return the number of the granule that contains a block."""
        return block // self.granule_blocks

    def blocks_of(self, granule: int) -> range:
        first = granule * self.granule_blocks
        return range(first, min(first + self.granule_blocks, self.blocks))


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with one block table: tokens of a block, and the most blocks that a request holds.

    most_blocks: a sliding window and a state need no more, however many tokens there are.
    """

    block_tokens: int
    most_blocks: int = sys.maxsize

    def blocks(self, tokens: int, requests: int = 1) -> int:
        """Return the most blocks that `requests` hold for `tokens` tokens together."""
        return min(-(-tokens // self.block_tokens), requests * self.most_blocks)


def blocks_in(groups: Iterable[KvGroup], tokens: int, requests: int = 1) -> int:
    """Return the most blocks of one pool that requests hold in all groups of layers together."""
    return sum(group.blocks(tokens, requests) for group in groups)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Running request: tokens to compute again if it is preempted, and the blocks that it holds."""

    request_id: str
    recompute_tokens: int
    blocks: Collection[int]


def empty_cheapest(
    count: int, used: Mapping[int, int], granules: Granules, rollouts: Sequence[Rollout]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return up to `count` granules to empty, and the ids of the requests to preempt for that.

    used: blocks in use of each granule that may be chosen. The granule whose rollouts are cheapest
    to recompute together is chosen, repeatedly. So a cheap rollout that would free nothing is left
    alone, and one that is preempted makes its other granules cheaper.
    """
    members_of = _rollouts_of(used, granules, rollouts)
    homes: dict[int, list[int]] = {}
    for granule, members in members_of.items():
        for member in members:
            homes.setdefault(member, []).append(granule)
    cost = {
        granule: sum(rollouts[member].recompute_tokens for member in members)
        for granule, members in members_of.items()
    }
    # The highest granule of equal prices goes first.
    heap = [(price, -granule) for granule, price in cost.items()]
    heapq.heapify(heap)
    emptied: list[int] = []
    gone: dict[int, None] = {}
    while heap and len(emptied) < count:
        price, granule = heapq.heappop(heap)
        if cost.get(-granule) != price:
            continue  # Chosen already, or an entry from before its price fell.
        del cost[-granule]
        emptied.append(-granule)
        for member in sorted(members_of[-granule] - gone.keys()):
            gone[member] = None
            for home in homes[member]:
                if home in cost:
                    cost[home] -= rollouts[member].recompute_tokens
                    heapq.heappush(heap, (cost[home], -home))
    return tuple(emptied), tuple(rollouts[member].request_id for member in gone)


def _rollouts_of(
    used: Mapping[int, int], granules: Granules, rollouts: Sequence[Rollout]
) -> dict[int, set[int]]:
    """Return the positions of the rollouts in each granule that only rollouts use."""
    members_of: dict[int, set[int]] = {}
    owned: dict[int, set[int]] = {}
    for member, rollout in enumerate(rollouts):
        for block in rollout.blocks:
            granule = granules.of(block)
            if granule in used:
                members_of.setdefault(granule, set()).add(member)
                owned.setdefault(granule, set()).add(block)
    return {
        granule: members
        for granule, members in members_of.items()
        if len(owned[granule]) == used[granule]
    }


@dataclass(frozen=True, slots=True)
class GranuleUse:
    """Use of one mapped granule: blocks `used` by requests, free blocks with `cached` prefixes.

    borrowed: the granule lies on pages of another process.
    """

    granule: int
    used: int
    cached: int
    borrowed: bool = False


@dataclass(frozen=True, slots=True)
class Shrink:
    """Plan of a shrink, in this order: preempt these requests, then take these granules."""

    granules: tuple[int, ...]
    preempt: tuple[str, ...] = ()


def cap_in_force(grant: Grant | None, now_ns: int, limits: GateLimits, before: int) -> int:
    """Return the cap in granules that holds now, NO_CAP for none; `before` is the last one.

    Only a live grant loosens it: silence never gives a guest more memory, and a cap that came late
    still takes some away.
    """
    if grant is None:
        return before
    if lapsed(grant, now_ns, limits) is None:
        return max(grant.kv_granule_cap, NO_CAP)
    return min((cap for cap in (grant.kv_granule_cap, before) if cap > NO_CAP), default=NO_CAP)


def granules_over(cap: int, granules: Granules, held: int) -> int:
    """Return how many more granules must be held under `cap`; negative: how many to give back."""
    wanted = 0 if cap <= NO_CAP else max(0, granules.count - cap)
    return wanted - held


def plan_shrink(
    count: int,
    granules: Granules,
    uses: Iterable[GranuleUse],
    rollouts: Callable[[], Sequence[Rollout]],
) -> Shrink:
    """Return the plan to take `count` granules: free ones, then cached ones, then by preempting.

    Of equal ones those on borrowed pages go first, which are wanted back soonest, then the highest:
    held neighbours also give up the pages that straddle them. `rollouts` is called only if the
    first two kinds do not suffice. The plan has fewer granules if the others hold blocks that no
    rollout accounts for.
    """
    uses = [use for use in uses if use.granule != granules.of(0)]
    unused = [use for use in uses if use.used == 0]
    unused.sort(key=lambda use: (use.cached, not use.borrowed, -use.granule))
    taken = tuple(use.granule for use in unused[:count])
    if len(taken) >= count:
        return Shrink(taken)
    used = {use.granule: use.used for use in uses if use.used}
    emptied, preempt = empty_cheapest(count - len(taken), used, granules, rollouts())
    return Shrink(taken + emptied, preempt)


def plan_growth(count: int, held: Iterable[int]) -> tuple[int, ...]:
    """Return the `count` held granules to map again: the lowest, so that the rest stay together."""
    return tuple(sorted(held)[:count])
