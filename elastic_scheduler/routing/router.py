"""Router: picks the cheapest replica for a turn, or its prefix's holder if nearly as cheap.

`cost.cost_s` is the cost of a turn on a replica. In a small fleet every replica is weighed, in a
large one a few of the cheapest by `ReplicaIndex`; always the holder of the trajectory's prefix. The
holder is kept unless another is cheaper by a margin. A turn waits rather than go to a replica
`PATIENCE` times dearer than one that is full.

The index has classes of replicas, so that a choice looks at a few of many thousand. A class has the
properties that a turn must not mix up, or that make replicas dear to one turn and cheap to the
next: free or full, kind, policy version, and the sizes of prefill rate and KV memory. In a class
replicas are in buckets by their standing wait, the time in which a turn of typical length would be
decoded, a quarter of an octave each, with one bit a bucket: the cheapest non-empty one is found in
one operation, and a replica changes buckets in constant time.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter, itemgetter
from random import Random

from elastic_scheduler.leases.lease_table import ReplicaKind
from elastic_scheduler.routing.cost import (
    CostQuery,
    Quote,
    ReplicaCandidate,
    ReplicaLoad,
    ReplicaView,
    TurnNeed,
    TurnPlacement,
    TurnSpeeds,
    Weighed,
    cost_s,
    refusal,
    weigh,
)
from elastic_scheduler.routing.decision_log import RoutingDecision, RoutingLog
from elastic_scheduler.routing.predictors import (
    TRAJECTORIES_KEPT,
    LengthPredictor,
    Prefix,
    PrefixAffinity,
    SharedPrefixes,
)

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
STICKY_MARGIN = 0.25
PATIENCE = 8.0
# Fleets up to this size are weighed whole.
EXACT_UP_TO = 16
# Weighed replicas that the log of choices keeps.
CHEAPEST_KEPT = 5
# Replicas whose standing wait is brought up to date with every choice.
FRESHENED = 1
# A replica that costs this much more than the best does not belong among the cheapest.
MISPLACED = 2.0
# A replica whose owed tokens fell to this share since it was placed belongs among cheaper ones.
WORKED_OFF = 0.75
# The expected tokens of turns are averaged over about this many of them.
TYPICAL_TURNS = 256
FIRST_TYPICAL_TOKENS = 256.0
# Mean seconds between two turns of a trajectory, before any were seen; and the number of such means
# after which a trajectory is not expected back.
FIRST_PAUSE_S = 10.0
PAUSES_KEPT = 8.0


class ReplicaClass:
    """Replicas of one class in the index, in buckets by the time that a turn would wait.

    most_kv_tokens: upper bound on their KV memory in tokens, 0 if unknown.
    """

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
        """Record that the bucket with this number got its first replica, or lost its last one."""
        self.mask ^= 1 << number
        self.floor_s = _FLOOR_S[(self.mask & -self.mask).bit_length() - 1]

    def draw(self, count: int, tokens: int, start: float, found: list[ReplicaLoad]) -> None:
        """Append to `found` up to `count` replicas with room for `tokens`, from the cheapest
        buckets.

        start: place in a bucket at which to begin, in [0, 1), so that equal replicas share the
        turns.
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
    """Index of usable replicas by class and waiting time; callers report by `place`."""

    def __init__(self, seed: int = 0) -> None:
        self._groups: dict[tuple[bool, ReplicaKind], dict[ClassKey, ReplicaClass]] = {
            (is_free, kind): {} for is_free in (True, False) for kind in ReplicaKind
        }
        self._home: dict[ReplicaLoad, tuple[ReplicaClass, int, bool]] = {}
        self._random = Random(seed)  # noqa: S311 - a tie among replicas is no secret
        self.free = 0

    def place(self, load: ReplicaLoad, wait_s: float) -> None:
        """Put a usable replica, or move it, into the bucket for `wait_s` seconds of waiting."""
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
        """Remove a replica; do nothing if it is not in the index."""
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
        """Delete classes without replicas, as old policy versions leave behind."""
        for group in self._groups.values():
            for key in [key for key, cell in group.items() if not cell.mask]:
                del group[key]

    def candidates(self, need: TurnNeed, *, free: bool) -> list[ReplicaLoad]:
        """Return a few cheap replicas of each kind whose class suits the turn.

        free: replicas below their cap on turns; otherwise full ones.
        """
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
        """Return about the least seconds that the turn takes on any replica; infinite if none
        suits.

        free: of replicas below their cap; otherwise of full ones.
        """
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


_by_cost = itemgetter(0)
_by_owed = attrgetter("owed")


class Router:
    """Chooser of a replica for each turn, with the load of all replicas.

    Times are monotonic seconds passed in.
    """

    def __init__(self, seed: int = 0, sessions_kept: int = TRAJECTORIES_KEPT) -> None:
        self._loads: dict[str, ReplicaLoad] = {}
        self._order: list[ReplicaLoad] = []
        self._cursor = 0
        self._index = ReplicaIndex(seed)
        self._resting: list[tuple[float, str]] = []
        self._prefixes = PrefixAffinity(sessions_kept)
        self._shared = SharedPrefixes()
        self._lengths = LengthPredictor(sessions_kept)
        self._log = RoutingLog()
        self._typical_tokens = FIRST_TYPICAL_TOKENS
        self._pause_s = FIRST_PAUSE_S
        self._paces = TurnSpeeds()
        self._oldest_version: int | None = None
        self._usable_versions: set[int] = set()
        self._most_kv_tokens: int | None = None

    # ---- the table ----

    def set_table(
        self, views: Iterable[ReplicaView], now_s: float, renewed: Collection[str] = ()
    ) -> None:
        """Replace the table of replicas; a replica that stays keeps its load and measured rate.

        Replicas in `renewed` begin with no load: turns placed on them before are over.
        """
        loads: dict[str, ReplicaLoad] = {}
        for view in views:
            load = None if view.id in renewed else self._loads.pop(view.id, None)
            load = load or loads.get(view.id)
            if load is None:
                load = ReplicaLoad(view, now_s)
                self._arrange(load, now_s)
            elif load.view != view:
                load.set_view(view)
                self._arrange(load, now_s)
            loads[view.id] = load
        for gone in self._loads.values():
            self._index.remove(gone)
        self._index.drop_empty_classes()
        self._loads, self._order, self._cursor = loads, list(loads.values()), 0
        rows = [load.view for load in self._order]
        self._oldest_version = min((row.policy_version for row in rows), default=None)
        self._usable_versions = {row.policy_version for row in rows if row.usable}
        unknown = any(not row.kv_tokens for row in rows)
        most = max((row.kv_tokens for row in rows), default=0)
        self._most_kv_tokens = None if unknown or not rows else most

    def rest(self, replica: str, until_s: float) -> None:
        """Place no turn on a replica that just failed until `until_s`."""
        load = self._loads.get(replica)
        if load is not None:
            load.resting_until_s = until_s
            self._index.remove(load)
            heapq.heappush(self._resting, (until_s, replica))

    def holds(self, need: TurnNeed) -> bool:
        """Return True if a replica has the prefix of the turn's trajectory."""
        return self._cached(need.session) is not None

    def live_turns(self) -> dict[str, int]:
        """Return the number of live turns on each replica of the table, by replica id."""
        return {name: load.live for name, load in self._loads.items()}

    def reachable(self, need: TurnNeed) -> bool:
        """Return False if the turn needs exactly a version that every replica has passed.

        Versions only grow, so waiting cannot help such a turn.
        """
        if need.exact_version is None or self._oldest_version is None:
            return True
        return self._oldest_version <= need.exact_version

    def has_version(self, need: TurnNeed) -> bool:
        """Return True if any usable replica, free or full, runs a version that the turn accepts."""
        return any(need.accepts(version) for version in self._usable_versions)

    def fits(self, need: TurnNeed) -> bool:
        """Return True if the turn fits the KV memory of the largest replica, free or full.

        Unknown sizes count as large enough.
        """
        most = self._most_kv_tokens
        return most is None or need.prompt_tokens + need.budget_tokens <= most

    def expected_tokens(self, need: TurnNeed) -> int:
        """Return the number of tokens that the turn is still expected to generate, at most its
        budget.
        """
        return self._expected(need)

    @property
    def heard_s(self) -> float:
        """Time at which a replica of the table last sent tokens or began to work; 0 if none did."""
        return max((load.heard_s for load in self._order), default=0.0)

    def has_room(self) -> bool:
        """Return True if any usable replica is below its cap, or rests after a failure."""
        return self._index.free > 0 or bool(self._resting)

    # ---- the choice ----

    def choose(
        self, need: TurnNeed, now_s: float, avoid: str = "", *, displaces: bool = True
    ) -> str | None:
        """Return the replica that should take the turn now, None if the turn should wait.

        The choice and its reason are logged. avoid: replica that just failed this turn; it is
        chosen only if no other can take the turn. displaces: False for a turn that waits where it
        would push prefixes of other trajectories out of the KV memory.
        """
        self._wake(now_s)
        ask = self._ask(need)
        weighed = self._weighed(ask, now_s)
        others = [each for each in weighed if each[1].view.id != avoid] if avoid else weighed
        others = others or weighed
        if not others:
            return self._decide(ask, now_s, None, "no replica may take it now", others)
        if need.session and ask.holder is None:
            roomy = [each for each in others if self._has_memory(each[1], ask, now_s)]
            if not (roomy or displaces) and len(self._order) <= EXACT_UP_TO:
                return self._decide(ask, now_s, None, "waits for KV of other trajectories", others)
            others = roomy or others
        best_s, best = min(others, key=_by_cost)
        if self._should_wait(ask, best_s, now_s):
            return self._decide(ask, now_s, None, "waits for a full replica, far cheaper", others)
        for each_s, each in others:
            if each is ask.holder and each_s * (1 - STICKY_MARGIN) <= best_s:
                return self._decide(ask, now_s, each, "holds the prefix", others)
        if len(self._order) > EXACT_UP_TO:
            self._freshen(others, best_s, now_s)
        return self._decide(ask, now_s, best, "cheapest", others)

    def escape(
        self,
        need: TurnNeed,
        replica: str,
        waited_s: float,
        now_s: float,
        claimed: Mapping[str, int],
    ) -> str | None:
        """Return the replica to which a turn moves after `waited_s` without a token; None: it
        stays.

        The turn moves once it has waited as long as the move would cost, so a pause costs at most
        twice the best choice. claimed: places on each replica that were just promised to other
        turns.
        """
        self._wake(now_s)
        ask = self._ask(need)
        better = [
            (each_s, each)
            for each_s, each in self._weighed(ask, now_s)
            if each.view.id != replica
            and each_s <= waited_s
            and each.view.max_sequences - each.live > claimed.get(each.view.id, 0)
        ]
        if not better:
            return None
        best = min(better, key=_by_cost)[1]
        return self._decide(ask, now_s, best, f"{replica} is silent for longer than that", better)

    def left_s(self, placement: TurnPlacement, need: TurnNeed, silent_s: float) -> float:
        """Return the seconds that a live turn will still take, 0 if unknown.

        need: the rest of the turn.
        """
        return self._paces.left_s(placement, self._expected(need), silent_s)

    def copy_of(self, need: TurnNeed, replica: str, now_s: float) -> Quote | None:
        """Return the replica on which a copy of a turn would end first, with the time; None if
        unknown.

        replica: the replica of the running turn, which is left out.
        """
        self._wake(now_s)
        ask = self._ask(need)
        loads = [load for _, load in self._weighed(ask, now_s) if load.view.id != replica]
        return self._paces.quote(loads, ask, now_s)

    def take(self, quote: Quote, why: str, now_s: float) -> TurnPlacement:
        """Add a quoted copy of a turn to its replica's load, log the reason, and return its
        placement.
        """
        self._decide(quote.ask, now_s, quote.load, why, quote.weighed)
        return self.begin(quote.replica, quote.ask.need, now_s)

    def explain(self, need: TurnNeed, now_s: float) -> list[ReplicaCandidate]:
        """Return every replica of the table with its cost for the turn, or why it is barred."""
        ask = self._ask(need)
        return [weigh(load, ask, now_s) for load in self._order]

    def explained(self, subject: str) -> tuple[RoutingDecision, ...]:
        """Return the logged choices for a request id or a trajectory, oldest first."""
        return self._log.of(subject)

    def forget(self, session: str) -> None:
        """Forget the prefix and lengths of a trajectory that is over; its logged choices stay."""
        prefix = self._prefixes.find(session)
        if prefix is not None and prefix.replica in self._loads:
            self._loads[prefix.replica].working_set.drop(session)
        self._prefixes.forget(session)
        self._lengths.forget(session)

    @property
    def sessions_known(self) -> int:
        """Number of trajectories with a known prefix or length, whichever is greater."""
        return max(len(self._prefixes), len(self._lengths))

    # ---- the turn ----

    def begin(self, replica: str, need: TurnNeed, now_s: float) -> TurnPlacement:
        """Add the turn to the replica's load and return its placement.

        Raises ValueError if the replica is at its cap.
        """
        load = self._loads[replica]
        if not load.is_open:
            raise ValueError(f"{replica} has {load.live} turns already; choose() first")
        expected = self._expected(need)
        self._typical_tokens += (expected - self._typical_tokens) / TYPICAL_TURNS
        load.add_turn(expected, now_s)
        context = need.prompt_tokens + expected
        rested_s = load.working_set.begin(need.session, context)
        load.working_set.trim(load.view.kv_tokens)
        if rested_s is not None:
            self._pause_s += (now_s - rested_s - self._pause_s) / TYPICAL_TURNS
        self._arrange(load, now_s)
        return TurnPlacement(replica, need, expected, load, context)

    def progress(self, placement: TurnPlacement, tokens: int, now_s: float) -> None:
        """Record that a live turn got `tokens` more tokens."""
        load = placement.load
        load.heard_s = now_s
        load.meter.add(tokens)
        if not placement.generated_tokens:
            placement.first_tokens, placement.first_s = tokens, now_s
        placement.last_s = now_s
        placement.generated_tokens += tokens
        made = min(tokens, placement.owed_tokens)
        if made == placement.owed_tokens:
            # A turn that outlived its forecast is expected to last half as long again.
            left = placement.need.budget_tokens - placement.generated_tokens
            made -= max(0, min(left, 1 + placement.generated_tokens // 2))
        placement.owed_tokens -= made
        load.owed -= made
        if load.owed < WORKED_OFF * load.placed_owed and load.bucket is not None:
            self._arrange(load, now_s)

    def end(
        self,
        placement: TurnPlacement,
        now_s: float,
        *,
        revoked: bool = False,
        finished: bool = False,
        wanted: bool = True,
    ) -> None:
        """Remove the turn from its replica's load; the replica now caches the trajectory's prefix.

        revoked: the replica's lease ended under the turn. finished: the turn is complete, so its
        length counts in forecasts. wanted: False if nothing continues from the turn, so that its
        prefix is not remembered.
        """
        load, need, made = placement.load, placement.need, placement.generated_tokens
        load.drop_turn(placement.owed_tokens, now_s, revoked)
        keeps = need.session and made and wanted and not revoked
        kept, kv_tokens = need.prompt_tokens + made if keeps else 0, load.view.kv_tokens
        load.working_set.end(
            placement.context_tokens, need.session, kept if kv_tokens else 0, now_s
        )
        load.working_set.trim(kv_tokens)
        self._paces.note(placement)
        if self._loads.get(placement.replica) is load:
            self._arrange(load, now_s)
        if keeps:
            held = Prefix(placement.replica, kept, load.view.policy_version)
            self._prefixes.note(need.session, held)
        elif need.prefix_keys and made and not revoked:
            self._shared.note(need.prefix_keys, placement.replica, load.view.policy_version)
        if finished:
            self._lengths.observe(need.job, need.session, need.group, need.made_tokens + made)

    # ---- inside ----

    def _ask(self, need: TurnNeed) -> CostQuery:
        expected = self._expected(need)
        is_long = self._lengths.is_long(need.job, need.made_tokens + expected)
        if need.prefix_keys and not need.session:
            return self._ask_by_prefix(need, expected, is_long)
        prefix = self._cached(need.session)
        if prefix is None:
            return CostQuery(need, expected, is_long, None, 0)
        return CostQuery(need, expected, is_long, self._loads[prefix.replica], prefix.tokens)

    def _cached(self, session: str) -> Prefix | None:
        """Return the prefix of a trajectory that a replica of the table holds, None without one."""
        prefix = self._prefixes.find(session) if session else None
        holder = self._loads.get(prefix.replica) if prefix is not None else None
        # A replica drops its caches when it changes versions.
        if holder is None or prefix is None or holder.view.policy_version != prefix.version:
            return None
        displaced = holder.view.kv_tokens and session not in holder.working_set
        return None if displaced else prefix

    def _ask_by_prefix(self, need: TurnNeed, expected: int, is_long: bool) -> CostQuery:
        """Return the turn with the replica that caches its beginning and owes the fewest tokens."""
        shared = self._shared.find(need.prefix_keys)
        loads = [
            load
            for held in shared.holders
            if (load := self._loads.get(held.replica)) is not None
            and load.view.policy_version == held.version
        ]
        if not loads:
            return CostQuery(need, expected, is_long, None, 0)
        holder = min(loads, key=_by_owed)
        return CostQuery(need, expected, is_long, holder, shared.tokens)

    def _expected(self, need: TurnNeed) -> int:
        """Return the number of tokens still to come: the turn's likely total less its present ones.

        A turn longer than its forecast is expected to grow by half.
        """
        made, budget = need.made_tokens, need.budget_tokens
        whole = self._lengths.expected(need.job, need.session, need.group, made + budget)
        left = whole - made if whole > made else 1 + made // 2
        return max(1, min(budget, left))

    def _weighed(self, ask: CostQuery, now_s: float) -> list[Weighed]:
        """Return (seconds, load) of replicas that may take the turn now, the prefix's holder
        included.
        """
        need = ask.need
        if len(self._order) <= EXACT_UP_TO:
            loads = [load for load in self._order if not refusal(load, need, now_s)]
            return [(cost_s(load, ask, now_s), load) for load in loads]
        found = self._index.candidates(need, free=True)
        weighed = [(cost_s(load, ask, now_s), load) for load in found]
        holder = ask.holder
        if holder is not None and holder not in found and not refusal(holder, need, now_s):
            weighed.append((cost_s(holder, ask, now_s), holder))
        return weighed

    def _has_memory(self, load: ReplicaLoad, ask: CostQuery, now_s: float) -> bool:
        """Return True if the replica's KV memory has room for a trajectory that it does not hold.

        Otherwise it would push out the prefix of one that is about to come back, which would then
        be computed anew with each of its turns.
        """
        tokens = ask.need.prompt_tokens + ask.expected_tokens
        oldest_s = now_s - PAUSES_KEPT * self._pause_s
        return load.working_set.fits(tokens, load.view.kv_tokens, oldest_s)

    def _should_wait(self, ask: CostQuery, best_s: float, now_s: float) -> bool:
        """Return True if the turn would cost 8 times more on the best free replica than on a full
        one.
        """
        need, loads = ask.need, self._order
        if len(loads) > EXACT_UP_TO:
            if best_s <= PATIENCE * self._index.floor_s(need, free=False):
                return False
            loads = self._index.candidates(need, free=False)
        return any(
            best_s > PATIENCE * cost_s(load, ask, now_s)
            for load in loads
            if refusal(load, need, now_s) == "full"
        )

    def _decide(
        self,
        ask: CostQuery,
        now_s: float,
        load: ReplicaLoad | None,
        why: str,
        weighed: list[Weighed],
    ) -> str | None:
        need, chosen = ask.need, None if load is None else load.view.id
        if chosen is None and self._log.waits(need, why):
            return None
        if len(weighed) > CHEAPEST_KEPT:
            weighed = heapq.nsmallest(CHEAPEST_KEPT, weighed, key=_by_cost)
        pairs = tuple([(each.view.id, each_s) for each_s, each in weighed])
        decision = RoutingDecision(
            now_s, need.request_id, chosen, why, ask.expected_tokens, ask.is_long, pairs
        )
        self._log.note(need, decision)
        return chosen

    def _wake(self, now_s: float) -> None:
        while self._resting and self._resting[0][0] <= now_s:
            load = self._loads.get(heapq.heappop(self._resting)[1])
            if load is not None and now_s >= load.resting_until_s:
                self._arrange(load, now_s)

    def _freshen(self, weighed: list[Weighed], best_s: float, now_s: float) -> None:
        """Update the index for replicas that cost twice the best, and for one more in turn."""
        for each_s, load in weighed:
            if each_s > MISPLACED * best_s:
                self._arrange(load, now_s)
        for _ in range(FRESHENED):
            self._cursor = (self._cursor + 1) % len(self._order)
            self._arrange(self._order[self._cursor], now_s)

    def _arrange(self, load: ReplicaLoad, now_s: float) -> None:
        """Put the replica into the index by its load, or remove it while unusable or resting."""
        if load.view.usable and now_s >= load.resting_until_s:
            self._index.place(load, load.wait_s(self._typical_tokens, now_s))
        else:
            self._index.remove(load)
