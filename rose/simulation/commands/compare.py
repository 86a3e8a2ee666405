"""`rose sim compare`: one scenario under several policies, on the same traffic and episodes."""

import argparse

from rose.command_line.output import Format, View, write
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
    warn_unfinished,
)
from rose.simulation.commands.tables import parts, view
from rose.simulation.policies.catalog import SETUPS, setup_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_scenario_options(parser)
    parser.add_argument(
        "--policies",
        default=",".join(SETUPS),
        metavar="A,B",
        help=f"the first one is what others are compared with; default {','.join(SETUPS)}",
    )
    add_run_options(parser, several=True)


def run(args: argparse.Namespace) -> int:
    """Run all, print, save. Raises RoseError with one line."""
    names = [name for name in args.policies.split(",") if name]
    if not names:
        raise ConfigError("--policies names none; give at least one")
    for name in names:
        setup_of(name)
    scenario, settings, seeds = taken_scenario(args), taken_settings(args.set), taken_seeds(args)
    asked = [Run(scenario, name, seed, settings) for seed in seeds for name in names]
    results = list(run_all(asked, args.workers, args.ray))
    several = len(seeds) > 1
    shown = view(
        results,
        lambda each, _: f"{each.policy} (seed {each.seed})" if several else each.policy,
        f"{scenario.name}, seeds 0 to {len(seeds) - 1}" if several else f"{scenario.name}, seed 0",
    )
    tables = (shown.tables[0], parts(results, scenario), *shown.tables[1:])
    write(View(shown.data, shown.lines, tables), Format(args.output))
    save(results, args.out)
    draw(results, args.plots)
    warn_unfinished(results)
    return 0
