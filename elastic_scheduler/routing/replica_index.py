"""Replicas by class and cost, so that a choice looks at a few of many thousand.

A class has the properties that a turn must not mix up, or that make replicas dear to one turn and
cheap to the next: free or full, kind, policy version, and the sizes of prefill rate and KV memory.
In a class replicas are in buckets by their standing wait, the time in which a turn of typical
length would be decoded, a quarter of an octave each, with one bit a bucket: the cheapest non-empty
one is found in one operation, and a replica changes buckets in constant time.
"""

import math
from operator import itemgetter
from random import Random

from elastic_scheduler.leases.lease_table import ReplicaKind
from elastic_scheduler.routing.cost import ReplicaLoad, TurnNeed

BUCKETS = 128
BUCKETS_AN_OCTAVE = 4
# Bucket 0 holds all below 2**-12 s, the last all above 2**19.75 s.
LOWEST_OCTAVE = -12
# A class of KV memory spans this many octaves: its bounds are 8**n tokens.
KV_OCTAVES = 3
# Classes of one kind that a choice looks into, and replicas that it takes of each.
DRAWS = (2, 1)
# A bucket is searched this far for replicas that are large enough.
SEARCHED = 16

_FLOOR_S = [2.0 ** (LOWEST_OCTAVE + number / BUCKETS_AN_OCTAVE) for number in range(BUCKETS)]
_by_estimate = itemgetter(0)
ClassKey = tuple[int, int, int]


class ReplicaClass:
    """Replicas that differ in their wait only; `most_kv_tokens` bounds them, 0: unknown."""

    __slots__ = ("buckets", "floor_s", "mask", "most_kv_tokens", "prompt_s", "version")

    def __init__(self, key: ClassKey) -> None:
        self.version, kv_class, prefill_octave = key
        self.most_kv_tokens = 1 << KV_OCTAVES * kv_class if kv_class else 0
        # Seconds that a prompt's token takes, in the middle of the octave.
        self.prompt_s = 1 / (0.75 * 2.0**prefill_octave)
        self.buckets: list[list[ReplicaLoad]] = [[] for _ in range(BUCKETS)]
        self.mask = 0
        self.floor_s = 0.0

    def flip(self, number: int) -> None:
        """Record that bucket `number` got its first replica, or lost its last one."""
        self.mask ^= 1 << number
        self.floor_s = _FLOOR_S[(self.mask & -self.mask).bit_length() - 1]

    def draw(self, count: int, tokens: int, start: float, found: list[ReplicaLoad]) -> None:
        """Append up to `count` replicas that hold `tokens`: of the cheapest buckets, from `start`.

        `start` in [0, 1) is where in a bucket to begin, so that equals share the turns.
        """
        mask, searched = self.mask, 0
        while mask and searched < SEARCHED:
            low = mask & -mask
            bucket = self.buckets[low.bit_length() - 1]
            mask ^= low
            size = len(bucket)
            first = int(start * size)
            for index in range(first, first + min(size, SEARCHED)):
                load = bucket[index if index < size else index - size]
                searched += 1
                if tokens <= load.view.kv_tokens or not load.view.kv_tokens:
                    found.append(load)
                    count -= 1
                    if not count:
                        return


class ReplicaIndex:
    """Index of the usable replicas by class and wait. The caller reports changes with `place`."""

    def __init__(self, seed: int = 0) -> None:
        self._groups: dict[tuple[bool, ReplicaKind], dict[ClassKey, ReplicaClass]] = {
            (is_free, kind): {} for is_free in (True, False) for kind in ReplicaKind
        }
        self._home: dict[ReplicaLoad, tuple[ReplicaClass, int, bool]] = {}
        self._random = Random(seed)  # noqa: S311 - a tie among replicas is no secret
        self.free = 0

    def place(self, load: ReplicaLoad, wait_s: float) -> None:
        """Put a usable replica into its bucket by its cap, its version and its standing wait."""
        view = load.view
        is_free = load.live < view.max_sequences
        kv_class = -(-view.kv_tokens.bit_length() // KV_OCTAVES)
        key = (view.policy_version, kv_class, math.frexp(load.prefill_tok_s)[1])
        group = self._groups[is_free, view.kind]
        cell = group.get(key)
        if cell is None:
            cell = group[key] = ReplicaClass(key)
        octaves = math.log2(wait_s) - LOWEST_OCTAVE if wait_s > 0 else 0.0
        number = min(BUCKETS - 1, max(0, int(octaves * BUCKETS_AN_OCTAVE)))
        load.placed_owed = load.owed
        bucket = cell.buckets[number]
        if load.bucket is bucket:
            return
        self.remove(load)
        if not bucket:
            cell.flip(number)
        load.bucket, load.slot = bucket, len(bucket)
        bucket.append(load)
        self._home[load] = (cell, number, is_free)
        self.free += is_free

    def remove(self, load: ReplicaLoad) -> None:
        """Remove a replica; nothing happens if it is not here."""
        bucket = load.bucket
        if bucket is None:
            return
        last = bucket.pop()
        if last is not load:
            bucket[load.slot] = last
            last.slot = load.slot
        load.bucket = None
        cell, number, is_free = self._home.pop(load)
        self.free -= is_free
        if not bucket:
            cell.flip(number)

    def drop_empty_classes(self) -> None:
        """Drop the empty classes that old policy versions leave behind."""
        for group in self._groups.values():
            for key in [key for key, cell in group.items() if not cell.mask]:
                del group[key]

    def candidates(self, need: TurnNeed, *, free: bool) -> list[ReplicaLoad]:
        """Return a few replicas of each kind that may take the turn, if not full."""
        tokens = need.prompt_tokens + need.budget_tokens
        start = self._random.random()
        found: list[ReplicaLoad] = []
        for kind in (ReplicaKind.GUEST, ReplicaKind.DEDICATED):
            cells = self._cells(need, free, kind)
            if len(cells) > 1:
                cells.sort(key=_by_estimate)
            for (_, cell), count in zip(cells, DRAWS, strict=False):
                cell.draw(count, tokens, start, found)
        return found

    def floor_s(self, need: TurnNeed, *, free: bool) -> float:
        """Return about the least cost of the turn on any replica; infinite if there is none."""
        guests = self._cells(need, free, ReplicaKind.GUEST)
        cells = guests + self._cells(need, free, ReplicaKind.DEDICATED)
        return min(cells, key=_by_estimate)[0] if cells else math.inf

    def _cells(
        self, need: TurnNeed, free: bool, kind: ReplicaKind
    ) -> list[tuple[float, ReplicaClass]]:
        prompt, least, exact = need.prompt_tokens, need.min_version, need.exact_version
        tokens = prompt + need.budget_tokens
        cells = []
        for cell in self._groups[free, kind].values():
            if (
                cell.mask
                and (least is None or cell.version >= least)
                and (exact is None or cell.version == exact)
                and (tokens <= cell.most_kv_tokens or not cell.most_kv_tokens)
            ):
                cells.append((cell.floor_s + prompt * cell.prompt_s, cell))
        return cells
