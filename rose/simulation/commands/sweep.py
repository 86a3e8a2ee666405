"""`rose sim sweep`: one scenario and policy with other constants, every combination once a seed."""

import argparse
from itertools import product

from rose.cli.output import Format, write
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
from rose.simulation.commands.tables import view
from rose.simulation.policies.catalog import CONSTANTS, SETTINGS, setup_of

MOST_RUNS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_scenario_options(parser)
    parser.add_argument("--policy", default="rose", metavar="NAME", help="default rose")
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="NAME=A,B,C",
        help=f"constants {', '.join(CONSTANTS)}; settings {', '.join(SETTINGS)}",
    )
    add_run_options(parser, several=True)


def run(args: argparse.Namespace) -> int:
    """Run all, print, save. Raises RoseError with one line."""
    setup_of(args.policy)
    scenario, settings, seeds = taken_scenario(args), taken_settings(args.set), taken_seeds(args)
    varied = dict(taken_values(word) for word in args.vary)
    grid = [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    asked = [
        Run(scenario, args.policy, seed, {**settings, **each}) for each in grid for seed in seeds
    ]
    if len(asked) > MOST_RUNS:
        raise ConfigError(f"--vary makes {len(asked)} runs; a sweep has at most {MOST_RUNS}")
    results = list(run_all(asked, args.workers, args.ray))

    def label(_: object, at: int) -> str:
        said = " ".join(f"{name}={asked[at].options[name]:g}" for name in varied)
        return f"{said} (seed {asked[at].seed})" if len(seeds) > 1 else said

    write(view(results, label, f"{scenario.name}, policy {args.policy}"), Format(args.output))
    save(results, args.out)
    draw(results, args.plots)
    warn_unfinished(results)
    return 0
