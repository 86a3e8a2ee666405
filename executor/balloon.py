"""The KV balloon's decisions: how many granules a guest may keep, and which ones go first.

    mapped ── take ──> held        pages go back once no step in flight can touch them
    held ── give back ──> mapped   pages are there again before the blocks re-enter the pool

Granule 0 holds vLLM's null block and is never taken, so the tightest cap is 1. A cap of 0 means
that none is set: zeroed memory and a node without KV policy leave the guest as large as it started.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from executor.gate import GateLimits, lapsed
from executor.granules import Granules
from executor.preemption import Rollout, empty_cheapest
from executor.sections import Grant

NO_CAP: Final = 0


@dataclass(frozen=True, slots=True)
class GranuleUse:
    """One mapped granule: blocks `used` by requests, free blocks that hold `cached` prefixes.

    `borrowed`: it lies on pages of another process's.
    """

    granule: int
    used: int
    cached: int
    borrowed: bool = False


@dataclass(frozen=True, slots=True)
class Shrink:
    """What to do, in this order: preempt these requests, then take these granules."""

    granules: tuple[int, ...]
    preempt: tuple[str, ...] = ()


def cap_in_force(grant: Grant | None, now_ns: int, limits: GateLimits, before: int) -> int:
    """The cap that holds now, given the one `before`; granules, NO_CAP for none.

    Only a live grant loosens it: silence never gives a guest more memory, and a cap that came
    late still takes some away.
    """
    if grant is None:
        return before
    if lapsed(grant, now_ns, limits) is None:
        return max(grant.kv_granule_cap, NO_CAP)
    return min((cap for cap in (grant.kv_granule_cap, before) if cap > NO_CAP), default=NO_CAP)


def granules_over(cap: int, granules: Granules, held: int) -> int:
    """How many more granules have to be held under `cap`; negative: so many may be given back."""
    wanted = 0 if cap <= NO_CAP else max(0, granules.count - cap)
    return wanted - held


def plan_shrink(
    count: int,
    granules: Granules,
    uses: Iterable[GranuleUse],
    rollouts: Callable[[], Sequence[Rollout]],
) -> Shrink:
    """Choose `count` granules: wholly free, then holding cached prefixes only, then by preempting.

    Of equals those on borrowed pages go first, which are wanted back soonest, then the highest:
    held neighbours also give up the pages that straddle them.
    `rollouts` is asked only when the first two kinds do not suffice. Fewer granules come back when
    the others hold blocks that no rollout accounts for.
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
    """The `count` held granules to map again: the lowest, so that the held ones stay together."""
    return tuple(sorted(held)[:count])
