"""Tables of results: one row a run, and what was assumed below."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial

from rose.command_line.output import Table, View
from rose.simulation.critical_path import longest_alone_s, most_gain
from rose.simulation.results import RunResult
from rose.simulation.scenario import Scenario

COLUMNS = (
    "RUN",
    "STEPS/H",
    "TOKENS/S",
    "X",
    "STEP S",
    "ROLLOUT S",
    "TRAIN S",
    "SYNC S",
    "TRAJ P50 S",
    "TRAJ P99 S",
    "SLO",
    "TTFT P99 S",
    "TPOT P99 MS",
    "GPU USE",
    "GUEST GPU H",
    "OVERHEAD",
)


def median(values: Iterable[float]) -> float:
    """Median; 0 of nothing."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def row(result: RunResult, label: str, base: RunResult | None) -> tuple[str, ...]:
    """One run as text; X: tokens/s as a multiple of the first run's."""
    steps, users = result.steps, result.users
    times = base.tokens_per_s if base is not None else 0.0
    return (
        label,
        f"{result.steps_per_hour:.2f}",
        f"{result.tokens_per_s:.0f}",
        f"{result.tokens_per_s / times:.2f}" if times else "",
        f"{median(step.ended_s - step.started_s for step in steps):.1f}",
        f"{median(step.rollout_s for step in steps):.1f}",
        f"{median(step.train_s for step in steps):.1f}",
        f"{median(step.sync_s for step in steps[1:]):.1f}",
        f"{result.trajectory_s.p50:.1f}",
        f"{result.trajectory_s.p99:.1f}",
        f"{users.attainment:.2%}" if users is not None else "",
        f"{users.ttft_s.p99:.3f}" if users is not None else "",
        f"{1e3 * users.tpot_s.p99:.1f}" if users is not None else "",
        f"{result.gpu_use:.0%}",
        f"{result.borrowed_gpu_hours:.2f}",
        f"{result.overhead_share:.2%}",
    )


def view(
    results: Sequence[RunResult], label: Callable[[RunResult, int], str], title: str = ""
) -> View:
    """All runs, compared with the first."""
    base = results[0] if results else None
    rows = tuple(row(each, label(each, at), base) for at, each in enumerate(results))
    table = Table(COLUMNS, rows, title, frozenset(COLUMNS[1:]), ("GUEST GPU H", "TRAJ P50 S"))
    return View([plain(each) for each in results], (), (table, *_assumed(results)))


PARTS = (
    "RUN",
    "ROLLOUT",
    "TRAIN",
    "SYNC",
    "BORROWED",
    "EPISODES",
    "TURN P50 S",
    "TURN P99 S",
    "LONGEST S",
    "X AT MOST",
)


def parts(results: Sequence[RunResult], scenario: Scenario) -> Table:
    """Return the parts of a step: shares of its time, tokens of guests, its longest episode's
    bound.

    EPISODES: at once, on the mean of rollout phases. LONGEST S: the longest episode of a batch,
    alone on a card, at the median; X AT MOST: by how much shorter rollouts could make the run
    faster, down to that. Both only if a step waits for its whole batch.
    """
    # All policies play the same episodes.
    longest_s = cache(partial(longest_alone_s, scenario))
    rows = []
    for each in results:
        steps = each.steps[1:] or each.steps
        whole_s = sum(step.ended_s - step.started_s for step in steps) or 1.0
        rollout_s = sum(step.rollout_s for step in each.steps) or 1.0
        made = sum(step.output_tokens for step in steps)
        borrowed = sum(step.borrowed_tokens for step in steps) / made if made else 0.0
        tails = bool(each.counts.get("buffer_deferred"))
        alone = [0.0 if tails else longest_s(each.seed, step.number) for step in steps]
        most = most_gain(steps, alone)
        rows.append(
            (
                each.policy,
                f"{sum(step.rollout_s for step in steps) / whole_s:.0%}",
                f"{sum(step.train_s for step in steps) / whole_s:.0%}",
                f"{sum(step.sync_s for step in steps) / whole_s:.0%}",
                f"{borrowed:.0%}",
                f"{each.trajectory_s.mean * each.trajectory_s.count / rollout_s:.0f}",
                f"{each.turn_s.p50:.1f}",
                f"{each.turn_s.p99:.1f}",
                f"{median(alone):.1f}" if most else "",
                f"{most:.2f}" if most else "",
            )
        )
    return Table(PARTS, tuple(rows), "where a step goes", frozenset(PARTS[1:]))


def plain(result: RunResult) -> dict[str, object]:
    """One run as JSON has it. Raises ValueError for a figure that is not finite."""
    result.to_json()
    return asdict(result)


def _assumed(results: Sequence[RunResult]) -> tuple[Table, ...]:
    said = dict.fromkeys(line for each in results for line in each.assumptions)
    rows = tuple((line,) for line in said)
    return (Table(("ASSUMED",), rows),)
