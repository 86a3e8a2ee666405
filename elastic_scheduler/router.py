"""Which replica generates the next turn.

    cost_s = (tokens still owed to running turns + this turn's budget) / live decode rate
           + uncached prompt tokens / prefill rate
           + silence: seconds since a replica with turns sent its last token

A pause that has lasted t is expected to last as long again, so silence counts in full. The cheapest
replica wins; the one that holds the session's prefix is kept unless another is cheaper by a margin.
A turn waits rather than go to a replica `PATIENCE` times dearer than one that is full.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic_scheduler.offer import ReplicaKind
from elastic_scheduler.rate import RateMeter

STICKY_MARGIN = 0.25
PATIENCE = 8.0
SESSIONS_KEPT = 16_384
# Used where a node does not know its rates: any figure serves if all such replicas get the same.
UNKNOWN_DECODE_TOK_S = 1_000.0
UNKNOWN_PREFILL_TOK_S = 10_000.0
# A stalled replica's rate goes to zero; its cost must stay finite to be compared.
MIN_RATE_TOK_S = 0.1


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as the router sees it; `usable` means leased and healthy."""

    id: str
    kind: ReplicaKind
    usable: bool
    policy_version: int
    max_sequences: int
    kv_tokens: int = 0
    decode_tok_s: float = 0.0
    prefill_tok_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnNeed:
    """What a turn asks of a replica; lengths in tokens."""

    session: str
    prompt_tokens: int
    budget_tokens: int
    min_version: int | None = None
    exact_version: int | None = None

    def accepts(self, version: int) -> bool:
        """Whether tokens of policy `version` may be part of this turn."""
        if self.exact_version is not None:
            return version == self.exact_version
        return self.min_version is None or version >= self.min_version


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica weighed for a turn; `refusal` is empty when it may take the turn now."""

    replica: str
    cost_s: float
    owed_tokens: int
    decode_tok_s: float
    uncached_tokens: int
    refusal: str


@dataclass(slots=True)
class _Load:
    view: ReplicaView
    meter: RateMeter
    live: int = 0
    owed: int = 0
    heard_s: float = 0.0
    resting_until_s: float = 0.0


@dataclass(slots=True)
class Placement:
    """A live turn on a replica; handed back with every token count and at its end."""

    replica: str
    session: str
    prompt_tokens: int
    owed_tokens: int
    load: _Load
    generated_tokens: int = 0


class Router:
    """Loads of all replicas and the choice among them. Times are monotonic seconds, handed in."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._prefixes: OrderedDict[str, tuple[str, int, int]] = OrderedDict()

    def set_table(self, views: Iterable[ReplicaView], now_s: float) -> None:
        """Replace the table; a replica that stays keeps its load and measured rate."""
        loads: dict[str, _Load] = {}
        for view in views:
            offered_tok_s = view.decode_tok_s or UNKNOWN_DECODE_TOK_S
            load = self._loads.get(view.id)
            if load is None:
                load = _Load(view, RateMeter(offered_tok_s, now_s))
            load.view = view
            load.meter.set_offered(offered_tok_s)
            loads[view.id] = load
        self._loads = loads

    def live_turns(self) -> dict[str, int]:
        """Turns on each replica of the table."""
        return {name: load.live for name, load in self._loads.items()}

    def rest(self, replica: str, until_s: float) -> None:
        """Send nothing to a replica that just failed until `until_s`."""
        load = self._loads.get(replica)
        if load is not None:
            load.resting_until_s = until_s

    def choose(self, need: TurnNeed, now_s: float, avoid: str = "") -> str | None:
        """The replica that should take the turn now; None: wait.

        `avoid` is the replica that just failed this turn: any other is better.
        """
        candidates = self.explain(need, now_s)
        free = [c for c in candidates if not c.refusal]
        others = [c for c in free if c.replica != avoid] or free
        if not others:
            return None
        best = min(others, key=_cost)
        full = [c.cost_s for c in candidates if c.refusal == "full"]
        if full and best.cost_s > PATIENCE * min(full):
            return None
        holder = self._holder(need.session)
        keeps = any(
            c.replica == holder and c.cost_s * (1 - STICKY_MARGIN) <= best.cost_s for c in others
        )
        return holder if keeps else best.replica

    def escape(
        self,
        need: TurnNeed,
        replica: str,
        waited_s: float,
        now_s: float,
        claimed: Mapping[str, int],
    ) -> str | None:
        """Where a turn should go that has heard nothing from `replica` for `waited_s`; None: stay.

        It stays as long as moving would cost: whenever the pause ends, that is at most twice what
        the best choice would have cost. `claimed` counts places that others were just promised.
        """
        candidates = [
            c
            for c in self.explain(need, now_s)
            if not c.refusal
            and c.replica != replica
            and c.cost_s <= waited_s
            and self._room(c.replica) > claimed.get(c.replica, 0)
        ]
        return min(candidates, key=_cost).replica if candidates else None

    def explain(self, need: TurnNeed, now_s: float) -> list[Candidate]:
        """Every replica of the table with its cost for this turn, or why it is out."""
        return [self._weigh(load, need, now_s) for load in self._loads.values()]

    def reachable(self, need: TurnNeed) -> bool:
        """Whether waiting can help: versions only grow, so a passed one never comes back."""
        if need.exact_version is None:
            return True
        versions = [load.view.policy_version for load in self._loads.values()]
        return not versions or min(versions) <= need.exact_version

    def has_version(self, need: TurnNeed) -> bool:
        """Whether any usable replica runs an acceptable version, free or not."""
        return any(
            load.view.usable and need.accepts(load.view.policy_version)
            for load in self._loads.values()
        )

    def fits(self, need: TurnNeed) -> bool:
        """Whether any replica, free or not, can hold the turn; unknown sizes count as enough."""
        tokens = need.prompt_tokens + need.budget_tokens
        views = [load.view for load in self._loads.values()]
        return not views or any(tokens <= v.kv_tokens or not v.kv_tokens for v in views)

    def has_room(self) -> bool:
        """Whether any usable replica is below its cap."""
        return any(
            load.view.usable and load.live < load.view.max_sequences
            for load in self._loads.values()
        )

    def begin(self, replica: str, need: TurnNeed, now_s: float) -> Placement:
        """Count the turn in. Raises ValueError beyond the replica's cap."""
        load = self._loads[replica]
        if load.live >= load.view.max_sequences:
            raise ValueError(f"{replica} has {load.live} turns already; choose() first")
        if load.live == 0:
            load.meter.set_busy(True, now_s)
            load.heard_s = now_s
        load.live += 1
        load.owed += need.budget_tokens
        return Placement(replica, need.session, need.prompt_tokens, need.budget_tokens, load)

    def progress(self, placement: Placement, tokens: int, now_s: float) -> None:
        """Tokens of a live turn arrived."""
        placement.load.heard_s = now_s
        placement.owed_tokens -= tokens
        placement.generated_tokens += tokens
        placement.load.owed -= tokens
        placement.load.meter.add(tokens)

    def end(self, placement: Placement, now_s: float) -> None:
        """Count the turn out; its replica now holds the session's prefix."""
        load = placement.load
        load.live -= 1
        load.owed -= placement.owed_tokens
        if load.live == 0:
            load.meter.set_busy(False, now_s)
        if placement.session and placement.generated_tokens:
            held = placement.prompt_tokens + placement.generated_tokens
            self._prefixes[placement.session] = (placement.replica, held, load.view.policy_version)
            self._prefixes.move_to_end(placement.session)
            if len(self._prefixes) > SESSIONS_KEPT:
                self._prefixes.popitem(last=False)

    def _room(self, replica: str) -> int:
        load = self._loads[replica]
        return load.view.max_sequences - load.live

    def _holder(self, session: str) -> str | None:
        held = self._prefixes.get(session)
        return held[0] if held is not None and self._is_warm(held) else None

    def _is_warm(self, held: tuple[str, int, int]) -> bool:
        """A replica drops its caches when it changes versions."""
        load = self._loads.get(held[0])
        return load is not None and load.view.policy_version == held[2]

    def _weigh(self, load: _Load, need: TurnNeed, now_s: float) -> Candidate:
        view = load.view
        held = self._prefixes.get(need.session)
        cached = held[1] if held is not None and held[0] == view.id and self._is_warm(held) else 0
        uncached = max(0, need.prompt_tokens - cached)
        rate_tok_s = load.meter.tok_s(now_s)
        cost_s = (load.owed + need.budget_tokens) / max(rate_tok_s, MIN_RATE_TOK_S)
        cost_s += uncached / (view.prefill_tok_s or UNKNOWN_PREFILL_TOK_S)
        if load.live:
            cost_s += now_s - load.heard_s
        refusal = _refusal(load, need, now_s)
        return Candidate(view.id, cost_s, load.owed, rate_tok_s, uncached, refusal)


def _cost(candidate: Candidate) -> float:
    return candidate.cost_s


def _refusal(load: _Load, need: TurnNeed, now_s: float) -> str:
    view = load.view
    if not view.usable:
        return "not leased or not healthy"
    if not need.accepts(view.policy_version):
        return f"runs version {view.policy_version}"
    if view.kv_tokens and need.prompt_tokens + need.budget_tokens > view.kv_tokens:
        return f"holds only {view.kv_tokens} tokens"
    if now_s < load.resting_until_s:
        return "failed a moment ago"
    if load.live >= view.max_sequences:
        return "full"
    return ""
