"""`rose sim paper`: the ROSE paper's set-ups under all policies, its rows beside ours.

The paper (arXiv 2605.06534) reports ranges over its set-ups, not one figure each: ours is inside a
range or it is not, and the table says so.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rose.command_line.output import Format, Table, View, write
from rose.errors import ConfigError
from rose.simulation.batch import Run, run_all
from rose.simulation.commands.options import (
    add_run_options,
    add_scale_option,
    draw,
    save,
    taken_scale,
    taken_seeds,
    taken_settings,
    warn_unfinished,
)
from rose.simulation.commands.tables import median, parts, plain, view
from rose.simulation.policies.catalog import SETUPS as POLICIES
from rose.simulation.results import RunResult
from rose.simulation.setups import SETUPS, setup_scenario

DEFAULT_SETUPS = "frozen_lake-8b,frozen_lake-8b-dapo,alfworld-32b,alfworld-32b-dapo"
Results = Mapping[str, Sequence[RunResult]]


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One figure of the paper: its range, and ours by `measure`."""

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
    users = [each.users.attainment for each in results.get(policy, ()) if each.users]
    return 100 * min(users, default=1.0)


def _overhead(results: Results, policy: str) -> float:
    return 100 * median(each.overhead_share for each in results.get(policy, ()))


ROWS = (
    PaperRow("throughput over fixed", 1.3, 3.3, "x", lambda r, p: _throughput(r, p, "fixed")),
    PaperRow("rollouts shorter than spot", 1.2, 1.5, "x", lambda r, p: _shorter(r, p, "spot")),
    PaperRow(
        "rollouts shorter than serverless",
        1.2,
        1.5,
        "x",
        lambda r, p: _shorter(r, p, "serverless"),
    ),
    PaperRow("users within their SLO", 99.0, 100.0, "%", _attained),
    PaperRow("allocation overhead", 0.3, 0.4, "%", _overhead),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--setups",
        default=DEFAULT_SETUPS,
        metavar="A,B",
        help=f"default {DEFAULT_SETUPS}; there are {', '.join(SETUPS)}",
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="each; default 3")
    parser.add_argument(
        "--load",
        type=float,
        default=1.0,
        metavar="X",
        help="requests of users as a multiple of the usual ones; default 1",
    )
    add_scale_option(parser)
    add_run_options(parser, several=True)


def run(args: argparse.Namespace) -> int:
    """Run all set-ups under all policies. Raises RoseError with one line."""
    names = [name for name in args.setups.split(",") if name]
    for name in names:
        if name not in SETUPS:
            raise ConfigError(f"there is no set-up {name!r}; choose from {', '.join(SETUPS)}")
    if args.steps < 1 or not 0 < args.load < float("inf"):
        raise ConfigError("--steps: at least 1, --load: above 0")
    settings, seeds, scale = taken_settings(args.set), taken_seeds(args), taken_scale(args)
    scenarios = [setup_scenario(SETUPS[name], args.steps, args.load, scale) for name in names]
    asked = [
        Run(scenario, policy, seed, settings)
        for scenario in scenarios
        for policy in POLICIES
        for seed in seeds
    ]
    results = list(run_all(asked, args.workers, args.ray))
    tables: list[Table] = []
    for name, scenario in zip(names, scenarios, strict=True):
        mine = [each for each, run in zip(results, asked, strict=True) if run.scenario is scenario]
        by_policy = {p: [each for each in mine if each.policy == p] for p in POLICIES}
        shown = view(mine, lambda each, _: each.policy, scenario.name).tables
        tables += (shown[0], parts(mine, scenario), _rows(name, by_policy), *shown[1:])
        draw(mine, args.plots / name if args.plots is not None else None)
    write(View([plain(each) for each in results], (), tuple(tables)), Format(args.output))
    save(results, args.out)
    warn_unfinished(results)
    return 0


def _rows(name: str, results: Results) -> Table:
    columns = ("FIGURE", "PAPER", "POLICY PAPER", "INSIDE", "POLICY ROSE")
    rows = []
    for row in ROWS:
        paper, rose = row.measure(results, "paper"), row.measure(results, "rose")
        inside = "yes" if row.low <= paper <= row.high else "no"
        said = f"{row.low:g} to {row.high:g}{row.unit}"
        rows.append((row.what, said, f"{paper:.2f}{row.unit}", inside, f"{rose:.2f}{row.unit}"))
    return replace(Table(columns, tuple(rows)), title=f"{name}: the paper's rows beside ours")
