"""How cyclic garbage is looked for: what is new, often, and what is old, while it is little.

Looking at an object takes a quarter of a microsecond or more, and a live stream is some two hundred
of them. The collector's own thresholds look through the young generation once it has *grown* by so
many: where turns end as fast as they begin it does not grow, and holds all live turns when it is
looked through at last, 40 ms at 2,000 streams. So the clock decides: what is new is looked through
every NEW_S, a millisecond or two, and does not count as new again.

A turn leaves no cycles behind, whatever way it ends; its objects go by their counts. What is old is
looked through for cycles that nobody knows of, every OLD_S, while that is little. Where it is much,
that is live turns, or cycles after all: those are let grow to TOO_MANY before everybody waits.

The heap of the start is frozen: never looked at.
"""

import asyncio
import gc

NEW_S = 0.05
# A burst between two of those is looked through by its number.
NEW = 10_000
# To count what is old costs 10 ms and more where it is much.
OLD_S = 30.0
# Old objects that one collection may look through, besides those that it is to find: some 20 ms.
LITTLE = 50_000
# Some 200 MB, and a pause of half a second.
TOO_MANY = 2_000_000
# The collector's own idea of when to look through what is old is never followed.
NEVER = 2**31 - 1


async def collect_in_small_steps(old_s: float = OLD_S) -> None:
    """Collect until cancelled; then the collector is as it was before."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW, NEVER, NEVER)
    try:
        while True:
            for _ in range(max(1, round(old_s / NEW_S))):
                await asyncio.sleep(min(NEW_S, old_s))
                gc.collect(0)
            look_through_old()
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def look_through_old() -> None:
    """Collect what grew old, unless that is much, and yet no more than live turns may be."""
    old = sum(len(gc.get_objects(generation)) for generation in (1, 2))
    if old <= LITTLE or old > TOO_MANY:
        gc.collect()
