"""Options that commands of `rose sim` share, and what they mean."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rose.command_line.output import add_output_options
from rose.errors import ConfigError
from rose.simulation.plots import save_plots
from rose.simulation.policies.catalog import check_options
from rose.simulation.results import RunResult
from rose.simulation.scenario import Scenario
from rose.simulation.scenario_file import read_scenario
from rose.simulation.setups import SETUPS, setup_scenario


def add_scenario_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a scenario and its changes."""
    parser.add_argument(
        "scenario", metavar="SCENARIO", help=f"a file, or a set-up: {', '.join(SETUPS)}"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="training steps to run")
    parser.add_argument("--until-s", type=float, metavar="S", help="end there at the latest")
    add_scale_option(parser)


def add_scale_option(parser: argparse.ArgumentParser) -> None:
    """Size of a set-up."""
    parser.add_argument(
        "--scale",
        type=float,
        metavar="X",
        help="a set-up with so much of its cards, batch and users: 0.25 is a quarter",
    )


def taken_scale(args: argparse.Namespace) -> float:
    """Scale of parsed options. Raises ConfigError."""
    scale = 1.0 if args.scale is None else float(args.scale)
    if not 0 < scale < float("inf"):
        raise ConfigError(f"--scale is {args.scale}; give a share above 0")
    return scale


def add_run_options(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Seed, options, where results go, and how many runs at once."""
    if several:
        parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1")
        parser.add_argument(
            "--workers", type=int, metavar="N", help="runs at once; default: one a core"
        )
        parser.add_argument(
            "--ray",
            nargs="?",
            const="local",
            metavar="ADDRESS",
            help="run on Ray: a cluster's address, or a local one",
        )
    else:
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a constant or setting other than the usual",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="results as JSON as well")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="folder for pictures of steps, use, SLO and tail"
    )
    add_output_options(parser)


def taken_scenario(args: argparse.Namespace) -> Scenario:
    """The scenario of parsed options. Raises ConfigError."""
    name, scale = str(args.scenario), taken_scale(args)
    if name in SETUPS:
        scenario = setup_scenario(SETUPS[name], scale=scale)
    elif args.scale is not None:
        raise ConfigError(f"--scale is for set-ups ({', '.join(SETUPS)}), and {name} is none")
    elif Path(name).suffix in (".yaml", ".yml", ".json") or Path(name).exists():
        scenario = read_scenario(Path(name))
    else:
        raise ConfigError(f"{name} is no file and no set-up; set-ups: {', '.join(SETUPS)}")
    if args.steps is not None:
        if args.steps < 1:
            raise ConfigError(f"--steps is {args.steps}; give at least 1")
        scenario = replace(scenario, trainer=replace(scenario.trainer, steps=args.steps))
    if args.until_s is not None:
        if not 0 < args.until_s < float("inf"):
            raise ConfigError(f"--until-s is {args.until_s}; give a time above 0")
        scenario = replace(scenario, until_s=args.until_s)
    return scenario


def taken_settings(words: Sequence[str]) -> dict[str, float]:
    """`NAME=VALUE` of each --set. Raises ConfigError."""
    options: dict[str, float] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word}: write NAME=VALUE")
        options[name] = _number(value, f"--set {word}")
    check_options(options)
    return options


def taken_values(word: str) -> tuple[str, tuple[float, ...]]:
    """`NAME=A,B,C` of --vary. Raises ConfigError."""
    name, equals, values = word.partition("=")
    if not equals or not values:
        raise ConfigError(f"--vary {word}: write NAME=A,B,C")
    found = tuple(_number(value, f"--vary {word}") for value in values.split(","))
    check_options({name: found[0]})
    return name, found


def taken_seeds(args: argparse.Namespace) -> range:
    """Seeds of parsed options. Raises ConfigError."""
    if args.seeds < 1:
        raise ConfigError(f"--seeds is {args.seeds}; give at least 1")
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"--workers is {args.workers}; give at least 1")
    return range(args.seeds)


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: {text!r} is no number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"{where}: {text} is no finite number")
    return value


def save(results: Sequence[RunResult], path: Path | None) -> None:
    """Write results to a file, where one was named. Raises ConfigError."""
    if path is None:
        return
    text = "[\n" + ",\n".join(each.to_json() for each in results) + "\n]\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error}") from error


def draw(results: Sequence[RunResult], folder: Path | None) -> None:
    """Draw the first seed's results, where a folder was named. Raises ConfigError."""
    if folder is None or not results:
        return
    first = results[0].seed
    try:
        save_plots([each for each in results if each.seed == first], folder)
    except OSError as error:
        raise ConfigError(f"--plots {folder} cannot be written: {error}") from error


def warn_unfinished(results: Sequence[RunResult]) -> None:
    """Say which runs ended before their last step."""
    for each in results:
        missing = each.counts.get("steps_missing", 0)
        if missing:
            sys.stderr.write(
                f"rose: {each.scenario} under {each.policy}: {missing} steps were not done after"
                f" {each.duration_s:.0f} s; give more with --until-s\n"
            )
