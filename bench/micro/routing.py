"""Time of a routing decision.

    python -m bench.micro.routing [--replicas N] [--trajectories N] [--decisions N] [--out FILE]

Prints one JSON object. A decision is `Router.choose` for the next turn of a live trajectory, in a
fleet of unlike replicas that carries that many turns: replicas decode at their rates, and for every
turn that ends another one is placed. Times are microseconds of wall time on one core. Another
process on the core shows in the upper percentiles first, so CPU time is beside them, and `again`:
the least of three more decisions of the same turn, which is what the decision itself takes.
`constant_cpu` is a loop that does the same each time: where its p99 is far above its p50, so is
everything's. `table_ms` is what a table of the whole fleet takes in which nothing changed.
`regret` is the cost of the choice over that of the cheapest replica of the whole fleet.

Exit code 1 when a decision takes longer than `MOST_AGAIN_P99_US`: a tenth of what it takes to weigh
3,000 replicas, which leaves room for a slow machine.
"""

import gc
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from bench.common.report import parser_of, put_judged
from elastic_scheduler import ReplicaKind, ReplicaView, Router, TurnNeed, TurnPlacement
from slo import percentile

BUDGET_TOKENS = 512
MEAN_TOKENS = 200
VERSIONS = (7, 8)
SENDING = 32
CHUNKS_PER_S = 25
AGAIN = 3
CONSTANT_STEPS = 900
MOST_AGAIN_P99_US = 500.0
# Decisions whose regret is computed.
JUDGED = 100


def make_view(number: int, cap: int, rng: random.Random) -> ReplicaView:
    """Return a replica: three in four are guests, and rates differ eightfold."""
    speed = rng.choice((1.0, 2.0, 4.0, 8.0))
    kind = ReplicaKind.DEDICATED if number % 4 == 0 else ReplicaKind.GUEST
    version = VERSIONS[number % 8 != 0]
    kv_tokens = rng.choice((65_536, 131_072, 400_000))
    return ReplicaView(
        f"r{number}", kind, True, version, cap, kv_tokens, 500.0 * speed, 5_000.0 * speed
    )


@dataclass(slots=True)
class _RoutedTurn:
    placement: TurnPlacement
    left: int


class RoutedFleet:
    """A router under steady load: replicas decode, a turn ends and another begins."""

    def __init__(self, replicas: int, trajectories: int, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a load, not a secret
        self._trajectories = trajectories
        self.router = Router()
        cap = max(2, 2 * trajectories // replicas)
        self._views = [make_view(number, cap, self._random) for number in range(replicas)]
        self.router.set_table(self._views, 0.0)
        self.now_s = 0.0
        self._live: dict[str, list[_RoutedTurn]] = {view.id: [] for view in self._views}
        self._heard_s = [0.0] * replicas
        self._next = 0
        self._asked = 0
        for _ in range(trajectories):
            need = self.need()
            self.begin(need, self.router.choose(need, self.now_s))

    def live_turns(self) -> int:
        return sum(len(turns) for turns in self._live.values())

    def need(self) -> TurnNeed:
        """Return the next turn of a trajectory; one in ten asks for the newest version."""
        number = self._asked % self._trajectories
        self._asked += 1
        prompt = self._random.randrange(200, 20_000)
        newest = VERSIONS[-1] if number % 10 == 0 else None
        name = f"t{number}"
        request_id = f"{name}.{self._asked}"
        return TurnNeed(name, prompt, BUDGET_TOKENS, newest, None, request_id, "job")

    def begin(self, need: TurnNeed, name: str | None) -> None:
        """Carry a decision out; lengths are exponential, cut off at the budget."""
        if name is not None:
            length = min(BUDGET_TOKENS, 1 + int(self._random.expovariate(1 / MEAN_TOKENS)))
            placement = self.router.begin(name, need, self.now_s)
            self._live[name].append(_RoutedTurn(placement, length))

    def decode(self) -> int:
        """Let the next few replicas send their new tokens; return the turns that ended."""
        ended = 0
        for _ in range(min(SENDING, len(self._views))):
            self._next = (self._next + 1) % len(self._views)
            view, turns = self._views[self._next], self._live[self._views[self._next].id]
            elapsed_s = self.now_s - self._heard_s[self._next]
            self._heard_s[self._next] = self.now_s
            if not turns:
                continue
            each = max(1, int(view.decode_tok_s * elapsed_s / len(turns)))
            for turn in list(turns):
                tokens = min(each, turn.left)
                self.router.progress(turn.placement, tokens, self.now_s)
                turn.left -= tokens
                if not turn.left:
                    self.router.end(turn.placement, self.now_s, finished=True)
                    turns.remove(turn)
                    ended += 1
        return ended

    def table_ms(self) -> float:
        """Return milliseconds of the router for a whole new table without a change."""
        views = [replace(view) for view in self._views]
        began_s = time.perf_counter()
        self.router.set_table(views, self.now_s)
        return (time.perf_counter() - began_s) * 1e3

    def regret(self, need: TurnNeed, name: str) -> float:
        """Return the cost of the choice over the cost of the cheapest possible replica."""
        costs = {
            each.replica: each.cost_s
            for each in self.router.explain(need, self.now_s)
            if not each.refusal
        }
        return costs[name] / min(costs.values())


def timed_us(fleet: RoutedFleet, need: TurnNeed) -> float:
    began_s = time.perf_counter()
    fleet.router.choose(need, fleet.now_s)
    return (time.perf_counter() - began_s) * 1e6


def constant_us() -> float:
    """Return CPU microseconds of work that never varies, to show the machine's part."""
    began_s, total = time.thread_time(), 0
    for number in range(CONSTANT_STEPS):
        total += number * number
    return (time.thread_time() - began_s) * 1e6


def measure(replicas: int, trajectories: int, decisions: int, judged: int) -> dict[str, Any]:
    """Return all figures of one fleet; `judged` decisions are held against the whole fleet."""
    fleet = RoutedFleet(replicas, trajectories)
    # The fleet stays: a collector that walks it again and again measures itself.
    gc.collect()
    gc.freeze()
    wall_us: list[float] = []
    cpu_us: list[float] = []
    again_us: list[float] = []
    constant: list[float] = []
    regrets: list[float] = []
    while len(wall_us) < decisions:
        # The whole fleet sends 25 times a second.
        fleet.now_s += SENDING / replicas / CHUNKS_PER_S
        for _ in range(fleet.decode()):
            need = fleet.need()
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            name = fleet.router.choose(need, fleet.now_s)
            wall_us.append((time.perf_counter() - wall_s) * 1e6)
            cpu_us.append((time.thread_time() - cpu_s) * 1e6)
            constant.append(constant_us())
            again_us.append(min(timed_us(fleet, need) for _ in range(AGAIN)))
            if name is not None and len(wall_us) % max(1, decisions // max(1, judged)) == 0:
                regrets.append(fleet.regret(need, name))
            fleet.begin(need, name)
    return {
        "replicas": replicas,
        "trajectories": trajectories,
        "live_turns": fleet.live_turns(),
        "decisions": len(wall_us),
        **{f"p{100 * q:g}_us": round(percentile(wall_us, q), 1) for q in (0.5, 0.9, 0.99, 0.999)},
        "cpu_p50_us": round(percentile(cpu_us, 0.5), 1),
        "cpu_p99_us": round(percentile(cpu_us, 0.99), 1),
        "constant_cpu_p50_us": round(percentile(constant, 0.5), 1),
        "constant_cpu_p99_us": round(percentile(constant, 0.99), 1),
        "table_ms": round(fleet.table_ms(), 1),
        "again_p50_us": round(percentile(again_us, 0.5), 1),
        "again_p99_us": round(percentile(again_us, 0.99), 1),
        "regret_p50": round(percentile(regrets, 0.5), 3) if regrets else None,
        "regret_p90": round(percentile(regrets, 0.9), 3) if regrets else None,
    }


def main() -> int:
    numbers: dict[str, Any] = {"replicas": 10_000, "trajectories": 100_000, "decisions": 20_000}
    args = parser_of(__doc__, "bench.micro.routing", **numbers).parse_args()
    row = measure(args.replicas, args.trajectories, args.decisions, JUDGED)
    return put_judged({"rows": [row]}, args.out, good=row["again_p99_us"] < MOST_AGAIN_P99_US)


if __name__ == "__main__":
    sys.exit(main())
