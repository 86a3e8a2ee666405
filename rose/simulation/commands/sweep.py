"""`rose sim sweep`: one scenario and policy with other constants, every combination once a seed.

`--vary` plays all combinations of the values that it names. `--around 0.2` plays each constant of
the policy alone, a fifth below and a fifth above what it is: which of them matter, and how much.
"""

import argparse
from collections.abc import Sequence
from itertools import product

from rose.command_line.output import Format, Table, View, write
from rose.errors import ConfigError
from rose.simulation.batch import Run, run_all
from rose.simulation.commands.options import (
    add_run_options,
    add_scenario_options,
    draw,
    save,
    taken_scenario,
    taken_seeds,
    taken_settings,
    taken_values,
    warn_unfinished,
)
from rose.simulation.commands.tables import median, view
from rose.simulation.policies.catalog import CONSTANTS, SETTINGS, setup_of, usual_value
from rose.simulation.results import RunResult

MOST_RUNS = 10_000
# A constant whose change moves throughput by less does not matter there.
MATTERS = 0.005
EFFECTS = ("CONSTANT", "IS", "LESS", "MORE", "SLO POINTS", "MATTERS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_scenario_options(parser)
    parser.add_argument("--policy", default="rose", metavar="NAME", help="default rose")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=A,B,C",
        help=f"constants {', '.join(CONSTANTS)}; settings {', '.join(SETTINGS)}",
    )
    parser.add_argument(
        "--around",
        type=float,
        metavar="SHARE",
        help="each constant alone, so much less and more than it is; not with --vary",
    )
    add_run_options(parser, several=True)


def run(args: argparse.Namespace) -> int:
    """Run all, print, save. Raises RoseError with one line."""
    setup_of(args.policy)
    scenario, settings, seeds = taken_scenario(args), taken_settings(args.set), taken_seeds(args)
    grid = _grid(args)
    asked = [
        Run(scenario, args.policy, seed, {**settings, **each}) for each in grid for seed in seeds
    ]
    if len(asked) > MOST_RUNS:
        raise ConfigError(f"--vary makes {len(asked)} runs; a sweep has at most {MOST_RUNS}")
    results = list(run_all(asked, args.workers, args.ray))

    def label(_: object, at: int) -> str:
        mine = grid[at // len(seeds)]
        said = " ".join(f"{name}={value:g}" for name, value in mine.items()) or "as it is"
        return f"{said} (seed {asked[at].seed})" if len(seeds) > 1 else said

    shown = view(results, label, f"{scenario.name}, policy {args.policy}")
    if args.around is not None:
        effects = _effects(results, grid, len(seeds))
        shown = View(shown.data, shown.lines, (shown.tables[0], effects, *shown.tables[1:]))
    write(shown, Format(args.output))
    save(results, args.out)
    draw(results, args.plots)
    warn_unfinished(results)
    return 0


def _grid(args: argparse.Namespace) -> list[dict[str, float]]:
    """Options of each run. Raises ConfigError."""
    if (args.around is None) == (not args.vary):
        raise ConfigError("give either --vary NAME=A,B,C or --around SHARE")
    if args.around is None:
        varied = dict(taken_values(word) for word in args.vary)
        return [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    if not 0 < args.around < 1:
        raise ConfigError(f"--around is {args.around}; give a share above 0 and below 1")
    grid: list[dict[str, float]] = [{}]
    for name in CONSTANTS:
        usual = usual_value(name)
        grid += ({name: usual * (1 + change)} for change in (-args.around, args.around))
    return grid


def _effects(results: Sequence[RunResult], grid: Sequence[dict[str, float]], seeds: int) -> Table:
    """Return each constant's effect: throughput and users' attainment, as medians over seeds."""
    by_options = [results[at * seeds : (at + 1) * seeds] for at in range(len(grid))]
    usual = by_options[0]
    rows = []
    for number, name in enumerate(CONSTANTS):
        less, more = by_options[1 + 2 * number], by_options[2 + 2 * number]
        changes = [_gain(each, usual) for each in (less, more)]
        rows.append(
            (
                name,
                f"{usual_value(name):g}",
                *(f"{change:+.1%}" for change in changes),
                f"{100 * min(_attained(less), _attained(more)) - 100 * _attained(usual):+.2f}",
                "no" if max(map(abs, changes)) < MATTERS else "yes",
            )
        )
    return Table(EFFECTS, tuple(rows), "tokens/s with one constant changed", frozenset(EFFECTS[1:]))


def _gain(results: Sequence[RunResult], usual: Sequence[RunResult]) -> float:
    """Median over seeds of tokens a second as a multiple of the usual, less one."""
    pairs = zip(results, usual, strict=True)
    return median(a.tokens_per_s / b.tokens_per_s - 1 for a, b in pairs if b.tokens_per_s)


def _attained(results: Sequence[RunResult]) -> float:
    return min((each.users.attainment for each in results if each.users), default=1.0)
