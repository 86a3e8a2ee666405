"""`rose sim run`: one scenario under one policy, step by step."""

import argparse

from rose.command_line.output import Format, Table, View, write
from rose.simulation.batch import Run, carry_out
from rose.simulation.commands.options import (
    add_run_options,
    add_scenario_options,
    draw,
    save,
    taken_scenario,
    taken_settings,
    warn_unfinished,
)
from rose.simulation.commands.tables import view
from rose.simulation.policies.catalog import setup_of
from rose.simulation.results import RunResult

STEP_COLUMNS = ("STEP", "S", "ROLLOUT S", "TRAIN S", "SYNC S", "TOKENS", "BORROWED", "OLDEST")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_scenario_options(parser)
    parser.add_argument("--policy", default="rose", metavar="NAME", help="default rose")
    add_run_options(parser, several=False)


def run(args: argparse.Namespace) -> int:
    """Run, print, save. Raises RoseError with one line."""
    setup_of(args.policy)
    scenario, settings = taken_scenario(args), taken_settings(args.set)
    result = carry_out(Run(scenario, args.policy, args.seed, settings))
    shown = view([result], lambda each, _: each.policy, f"{result.scenario}, seed {result.seed}")
    tables = (shown.tables[0], _steps(result), *shown.tables[1:])
    write(View(shown.data, shown.lines, tables), Format(args.output))
    save([result], args.out)
    draw([result], args.plots)
    warn_unfinished([result])
    return 0


def _steps(result: RunResult) -> Table:
    rows = tuple(
        (
            str(step.number),
            f"{step.ended_s - step.started_s:.1f}",
            f"{step.rollout_s:.1f}",
            f"{step.train_s:.1f}",
            f"{step.sync_s:.1f}",
            str(step.total_tokens),
            f"{step.borrowed_tokens / max(1, step.output_tokens):.0%}",
            str(step.oldest),
        )
        for step in result.steps
    )
    return Table(STEP_COLUMNS, rows, right=frozenset(STEP_COLUMNS))
