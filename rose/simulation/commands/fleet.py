"""`rose sim fleet`: 1,000 cards for days, as a fluid: what borrowing gives seven training jobs."""

import argparse
from pathlib import Path

from rose.command_line.output import Format, Table, View, add_output_options, write
from rose.errors import ConfigError
from rose.simulation.fluid.fleet import FleetResult, run_fleet
from rose.simulation.plots import save_fleet
from rose.simulation.workloads.fleets import thousand_cards

MOST_DAYS = 31.0
COLUMNS = ("JOB", "STEPS", "BORROWING", "TOKENS/S", "BORROWING", "X", "GUEST GPU H", "ROLLOUT H")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--days", type=float, default=1.0, metavar="N", help="default 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="folder for fleet.png")
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run alone and borrowing, draw, print. Raises RoseError with one line."""
    if not 0 < args.days <= MOST_DAYS:
        raise ConfigError(f"--days is {args.days}; give more than 0, at most {MOST_DAYS:g}")
    spec = thousand_cards(args.days)
    alone = run_fleet(spec, args.seed, borrows=False)
    borrowing = run_fleet(spec, args.seed)
    if args.plots is not None:
        save_fleet(borrowing, args.plots)
    write(view(alone, borrowing), Format(args.output))
    return 0


def view(alone: FleetResult, borrowing: FleetResult) -> View:
    """Both runs, a row a job."""
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
        Table(COLUMNS, tuple(rows), right=frozenset(COLUMNS[1:])),
        Table(("ASSUMED",), tuple((each,) for each in borrowing.assumptions)),
    )
    return View({"alone": alone.plain(), "borrowing": borrowing.plain()}, lines, tables)
