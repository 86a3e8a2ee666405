"""Tables of results: a row a run, the parts of a step, effects of constants, the paper's rows."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial

from rose.command_line.output import Table, View
from rose.simulation.engine_specs import EngineFigures, StepWork
from rose.simulation.fluid.fleet import FleetResult
from rose.simulation.fluid.what_if import WhatIfAnswer
from rose.simulation.policies import CONSTANTS, usual_value
from rose.simulation.results import RunResult, StepResult, UserLatencies
from rose.simulation.scenario import Scenario
from rose.simulation.workloads.episodes import RolloutEpisode

FLEET = ("JOB", "STEPS", "BORROWING", "TOKENS/S", "BORROWING", "X", "GUEST GPU H", "ROLLOUT H")
# A constant matters if its change moves throughput by at least this share.
MATTERS = 0.005


def median(values: Iterable[float]) -> float:
    """Return the median; 0 without values."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def _table(
    rows: Sequence[Mapping[str, str]],
    title: str = "",
    *,
    names: int = 1,
    spare: tuple[str, ...] = (),
) -> Table:
    """Return a table of rows, each a dictionary by column; all but the first `names` columns are
    figures.
    """
    columns = tuple(rows[0]) if rows else ()
    texts = tuple(tuple(each.values()) for each in rows)
    return Table(columns, texts, title, frozenset(columns[names:]), spare)


def _run_row(result: RunResult, label: str, base: RunResult) -> dict[str, str]:
    """Return a run's figures as text by column. X: tokens/s as a multiple of `base`'s."""
    steps, users, times = result.steps, result.users, base.tokens_per_s
    return {
        "RUN": label,
        "STEPS/H": f"{result.steps_per_hour:.2f}",
        "TOKENS/S": f"{result.tokens_per_s:.0f}",
        "X": f"{result.tokens_per_s / times:.2f}" if times else "",
        "STEP S": f"{median(step.seconds for step in steps):.1f}",
        "ROLLOUT S": f"{median(step.rollout_s for step in steps):.1f}",
        "TRAIN S": f"{median(step.train_s for step in steps):.1f}",
        "SYNC S": f"{median(step.sync_s for step in steps[1:]):.1f}",
        "TRAJ P50 S": f"{result.trajectory_s.p50:.1f}",
        "TRAJ P99 S": f"{result.trajectory_s.p99:.1f}",
        "SLO": f"{users.attainment:.2%}" if users is not None else "",
        "TTFT P99 S": f"{users.ttft_s.p99:.3f}" if users is not None else "",
        "TPOT P99 MS": f"{1e3 * users.tpot_s.p99:.1f}" if users is not None else "",
        "GPU USE": f"{result.gpu_use:.0%}",
        "GUEST GPU H": f"{result.borrowed_gpu_hours:.2f}",
        "OVERHEAD": f"{result.overhead_share:.2%}",
    }


def view(
    results: Sequence[RunResult], label: Callable[[RunResult, int], str], title: str = ""
) -> View:
    """Return a view of simulated runs: a table with a row for each, compared with the first, and
    their assumptions.
    """
    rows = [_run_row(each, label(each, at), results[0]) for at, each in enumerate(results)]
    table = _table(rows, title, spare=("GUEST GPU H", "TRAJ P50 S"))
    assumed = _assumed(line for each in results for line in each.assumptions)
    return View([plain(each) for each in results], (), (table, assumed))


def parts(results: Sequence[RunResult], scenario: Scenario) -> Table:
    """Return a table of each run's step: shares of its time, guests' tokens, and the bound that the
    longest episode sets.

    EPISODES: mean number at once in rollout phases. LONGEST S: the longest episode of a batch,
    alone on a card, at the median. X AT MOST: speed-up of the run if rollouts were as short as
    that. Both are empty unless a step waits for its whole batch.
    """
    # All policies play the same episodes.
    longest_s = cache(partial(longest_alone_s, scenario))
    rows = []
    for each in results:
        steps = each.steps[1:] or each.steps
        whole_s = sum(step.seconds for step in steps) or 1.0
        rollout_s = sum(step.rollout_s for step in each.steps) or 1.0
        made = sum(step.output_tokens for step in steps)
        borrowed = sum(step.borrowed_tokens for step in steps) / made if made else 0.0
        tails = bool(each.counts.get("buffer_deferred"))
        alone = [0.0 if tails else longest_s(each.seed, step.number) for step in steps]
        most = most_gain(steps, alone)
        rows.append(
            {
                "RUN": each.policy,
                "ROLLOUT": f"{sum(step.rollout_s for step in steps) / whole_s:.0%}",
                "TRAIN": f"{sum(step.train_s for step in steps) / whole_s:.0%}",
                "SYNC": f"{sum(step.sync_s for step in steps) / whole_s:.0%}",
                "BORROWED": f"{borrowed:.0%}",
                "EPISODES": f"{each.trajectory_s.mean * each.trajectory_s.count / rollout_s:.0f}",
                "TURN P50 S": f"{each.turn_s.p50:.1f}",
                "TURN P99 S": f"{each.turn_s.p99:.1f}",
                "LONGEST S": f"{median(alone):.1f}" if most else "",
                "X AT MOST": f"{most:.2f}" if most else "",
            }
        )
    return _table(rows, "where a step goes")


def plain(result: RunResult) -> dict[str, object]:
    """Return a run as a dictionary for JSON. Raises ValueError for a figure that is not finite."""
    result.to_json()
    return asdict(result)


def _assumed(lines: Iterable[str]) -> Table:
    return Table(("ASSUMED",), tuple((line,) for line in dict.fromkeys(lines)))


def steps_of(result: RunResult) -> Table:
    """Return a table with a row for each training step of a run."""
    rows = [
        {
            "STEP": str(step.number),
            "S": f"{step.seconds:.1f}",
            "ROLLOUT S": f"{step.rollout_s:.1f}",
            "TRAIN S": f"{step.train_s:.1f}",
            "SYNC S": f"{step.sync_s:.1f}",
            "TOKENS": str(step.total_tokens),
            "BORROWED": f"{step.borrowed_tokens / max(1, step.output_tokens):.0%}",
            "OLDEST": str(step.oldest),
        }
        for step in result.steps
    ]
    return _table(rows, names=0)


def alone_s(episode: RolloutEpisode, engine: EngineFigures) -> float:
    """Return the seconds of an episode on an engine that has nothing else to do and keeps its
    prefix.

    Turns of an episode follow each other, and a turn decodes token by token. More cards shorten a
    rollout phase only down to the longest episode's time, so only the time above it can be gained.
    """
    context, passed_s = 0, 0.0
    for turn in episode.turns:
        passed_s += engine.seconds(StepWork(turn.observed_tokens, 0, 1, context))
        context += turn.observed_tokens
        # The prompt's step makes the first token; the others have half of the turn behind them.
        middle = context + turn.output_tokens // 2
        passed_s += (turn.output_tokens - 1) * engine.seconds(StepWork(0, 1, 0, middle))
        context += turn.output_tokens
        passed_s += turn.environment_s
    return passed_s


def longest_alone_s(scenario: Scenario, seed: int, number: int) -> float:
    """Return the seconds that the longest episode of step `number`'s batch takes alone on an
    engine.

    0 for a trainer that need not wait for all of a batch: asynchronous, over-sampling, with rounds
    for the tail, or one that takes parts.
    """
    trainer = scenario.trainer
    if trainer.filters or trainer.max_staleness or trainer.tail_batching or trainer.parts:
        return 0.0
    first = number * trainer.groups
    return max(
        alone_s(
            scenario.rollouts.trajectory(seed, prompt, sample), scenario.cluster.dedicated.engine
        )
        for prompt in range(first, first + trainer.groups)
        for sample in range(trainer.samples)
    )


def most_gain(steps: Sequence[StepResult], alone: Sequence[float]) -> float:
    """Return the largest factor by which shorter rollouts alone could speed up these steps; 0 if
    unknown.

    alone: for each step, the seconds of `longest_alone_s`.
    """
    if not all(alone):
        return 0.0
    took_s = sum(step.seconds for step in steps)
    least_s = sum(
        min(longest_s, step.rollout_s) + step.train_s + step.sync_s
        for step, longest_s in zip(steps, alone, strict=True)
    )
    return took_s / least_s if least_s else 0.0


def effects(results: Sequence[RunResult], grid: Sequence[dict[str, float]], seeds: int) -> Table:
    """Return a table of each constant's effect on throughput and users' attainment, as medians over
    seeds.

    results: of each entry of `grid`, `seeds` runs; the first entry has the usual constants.
    """
    by_options = [results[at * seeds : (at + 1) * seeds] for at in range(len(grid))]
    usual = by_options[0]
    rows = []
    for number, name in enumerate(CONSTANTS):
        less, more = by_options[1 + 2 * number], by_options[2 + 2 * number]
        changes = [_gain(each, usual) for each in (less, more)]
        attained = min(_least_attained(less), _least_attained(more))
        rows.append(
            {
                "CONSTANT": name,
                "IS": f"{usual_value(name):g}",
                "LESS": f"{changes[0]:+.1%}",
                "MORE": f"{changes[1]:+.1%}",
                "SLO POINTS": f"{100 * attained - 100 * _least_attained(usual):+.2f}",
                "MATTERS": "no" if max(map(abs, changes)) < MATTERS else "yes",
            }
        )
    return _table(rows, "tokens/s with one constant changed")


def _gain(results: Sequence[RunResult], usual: Sequence[RunResult]) -> float:
    """Return the median over seeds of the relative gain in tokens per second over the usual."""
    pairs = zip(results, usual, strict=True)
    return median(a.tokens_per_s / b.tokens_per_s - 1 for a, b in pairs if b.tokens_per_s)


def _least_attained(results: Sequence[RunResult]) -> float:
    """Return the smallest share of users' requests that met their targets, over seeds; 1 without
    users.
    """
    return min((each.users.attainment for each in results if each.users), default=1.0)


Results = Mapping[str, Sequence[RunResult]]


@dataclass(frozen=True, slots=True)
class PaperRow:
    """Figure of the ROSE paper: its published range, and its function in our runs."""

    what: str
    low: float
    high: float
    unit: str
    measure: Callable[[Results, str], float]


def _throughput(results: Results, policy: str, over: str) -> float:
    below = median(each.tokens_per_s for each in results.get(over, ()))
    return median(each.tokens_per_s for each in results.get(policy, ())) / below if below else 0.0


def _rollout_s(results: Results, policy: str) -> float:
    return median(
        step.rollout_s for each in results.get(policy, ()) for step in each.steps[1:] or each.steps
    )


def _shorter(results: Results, policy: str, than: str) -> float:
    mine = _rollout_s(results, policy)
    return _rollout_s(results, than) / mine if mine else 0.0


def _attained(results: Results, policy: str) -> float:
    return 100 * _least_attained(results.get(policy, ()))


def _overhead(results: Results, policy: str) -> float:
    return 100 * median(each.overhead_share for each in results.get(policy, ()))


ROWS = (
    PaperRow("throughput over fixed", 1.3, 3.3, "x", lambda r, p: _throughput(r, p, "fixed")),
    PaperRow("rollouts shorter than spot", 1.2, 1.5, "x", lambda r, p: _shorter(r, p, "spot")),
    PaperRow(
        "rollouts shorter than serverless", 1.2, 1.5, "x", lambda r, p: _shorter(r, p, "serverless")
    ),
    PaperRow("users within their SLO", 99.0, 100.0, "%", _attained),
    PaperRow("allocation overhead", 0.3, 0.4, "%", _overhead),
)


def paper_rows(name: str, results: Results) -> Table:
    """Return a table of the paper's figures for a set-up beside ours. results: runs by policy."""
    rows = []
    for row in ROWS:
        paper, rose = row.measure(results, "paper"), row.measure(results, "rose")
        rows.append(
            {
                "FIGURE": row.what,
                "PAPER": f"{row.low:g} to {row.high:g}{row.unit}",
                "POLICY PAPER": f"{paper:.2f}{row.unit}",
                "INSIDE": "yes" if row.low <= paper <= row.high else "no",
                "POLICY ROSE": f"{rose:.2f}{row.unit}",
            }
        )
    return _table(rows, f"{name}: the paper's rows beside ours", names=5)


def what_if_view(answer: WhatIfAnswer) -> View:
    """Return a view of a what-if answer: gains, users' latencies with and without lending, and
    assumptions.
    """
    gains = (
        ("users keep the hosts busy", f"{answer.busy:.1%} of the time"),
        ("rollouts could have", f"{answer.lent:.1%} of the cards"),
        ("hosts are held for being too busy", f"{answer.held:.1%} of the time"),
        ("tokens that could be harvested", f"{answer.harvested_tokens_a_day:.3g} a day"),
        ("GPU-hours saved", f"{answer.gpu_hours_saved_a_day:.0f} a day"),
    )
    alone, lending = _column(answer.alone), _column(answer.lending)
    names = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "within targets")
    return View(
        answer.plain(),
        (f"{answer.requests} requests in {answer.hours:.2f} h on {answer.hosts} hosts",),
        (
            Table(("FIGURE", "VALUE"), gains, right=frozenset(("VALUE",))),
            Table(
                ("USERS", "ALONE", "LENDING"),
                tuple(zip(names, alone, lending, strict=True)),
                right=frozenset(("ALONE", "LENDING")),
            ),
            _assumed(answer.assumptions),
        ),
    )


def _column(users: UserLatencies) -> tuple[str, ...]:
    return (
        f"{users.ttft_s.p50:.3f} s",
        f"{users.ttft_s.p99:.3f} s",
        f"{1e3 * users.tpot_s.p50:.1f} ms",
        f"{1e3 * users.tpot_s.p99:.1f} ms",
        f"{users.attainment:.3%}",
    )


def fleet_view(alone: FleetResult, borrowing: FleetResult) -> View:
    """Return a view of two runs of a fleet, without and with borrowing, with a row for each job."""
    rows = []
    for before, after in zip(alone.jobs, borrowing.jobs, strict=True):
        gain = after.tokens_per_s / before.tokens_per_s if before.tokens_per_s else 0.0
        rows.append(
            (
                after.name,
                str(before.steps),
                str(after.steps),
                f"{before.tokens_per_s:.0f}",
                f"{after.tokens_per_s:.0f}",
                f"{gain:.2f}" if gain else "",
                f"{after.borrowed_gpu_hours:.0f}",
                f"{after.rollout_hours:.1f}",
            )
        )
    lines = (
        f"{borrowing.cards} cards for {borrowing.hours:.0f} h; users keep serving cards busy for"
        f" {borrowing.users_busy:.0%} of the time",
        f"cards in use: {alone.gpu_use:.1%} alone, {borrowing.gpu_use:.1%} borrowing, which lends"
        f" {borrowing.borrowed_gpu_hours:.0f} GPU-hours",
    )
    tables = (
        Table(FLEET, tuple(rows), right=frozenset(FLEET[1:])),
        _assumed(borrowing.assumptions),
    )
    return View({"alone": alone.plain(), "borrowing": borrowing.plain()}, lines, tables)
