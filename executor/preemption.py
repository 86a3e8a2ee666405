"""Which rollouts to preempt so that granules of KV blocks become empty: the cheapest ones."""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from executor.granules import Granules


@dataclass(frozen=True, slots=True)
class Rollout:
    """A running request: what preempting it costs, and the blocks it would leave."""

    request_id: str
    recompute_tokens: int
    blocks: Collection[int]


def empty_cheapest(
    count: int, used: Mapping[int, int], granules: Granules, rollouts: Sequence[Rollout]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Choose up to `count` granules to empty and the requests that have to go for it.

    `used`: blocks in use of each granule that may be chosen. Again and again the granule goes whose
    rollouts are cheapest to recompute together. So a cheap rollout that would free nothing is left
    alone, and one that has to go makes its other granules cheaper.
    """
    tenants = _tenants(used, granules, rollouts)
    homes: dict[int, list[int]] = {}
    for granule, members in tenants.items():
        for member in members:
            homes.setdefault(member, []).append(granule)
    cost = {
        granule: sum(rollouts[member].recompute_tokens for member in members)
        for granule, members in tenants.items()
    }
    # Of equals the highest granule goes first.
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
        for member in sorted(tenants[-granule] - gone.keys()):
            gone[member] = None
            for home in homes[member]:
                if home in cost:
                    cost[home] -= rollouts[member].recompute_tokens
                    heapq.heappush(heap, (cost[home], -home))
    return tuple(emptied), tuple(rollouts[member].request_id for member in gone)


def _tenants(
    used: Mapping[int, int], granules: Granules, rollouts: Sequence[Rollout]
) -> dict[int, set[int]]:
    """The rollouts (by position) of each granule; granules with blocks of others are left out."""
    tenants: dict[int, set[int]] = {}
    owned: dict[int, set[int]] = {}
    for member, rollout in enumerate(rollouts):
        for block in rollout.blocks:
            granule = granules.of(block)
            if granule in used:
                tenants.setdefault(granule, set()).add(member)
                owned.setdefault(granule, set()).add(block)
    return {
        granule: members
        for granule, members in tenants.items()
        if len(owned[granule]) == used[granule]
    }
