"""`rose sim`: run, compare, sweep, what-if, fleet and paper.

`run`, `compare`, `sweep` and `paper` play scenarios step by step: `RunBatch` prints and saves their
results. `what-if` answers by the fluid model and an operator's own trace, with step times of
published GPU tables; every assumption is listed under the answer. Nothing is measured: `rose
compare` on a real host has the last word. `fleet` plays 1,000 cards for days, as a fluid too.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isfinite
from pathlib import Path
from types import MappingProxyType

from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.command_line.output import Format, Table, View, add_output_options, write
from rose.command_line.parser import Parser
from rose.errors import ConfigError
from rose.simulation.fluid.fleet import run_fleet
from rose.simulation.fluid.what_if import WhatIfQuestion, what_if
from rose.simulation.plots import save_fleet, save_plots, save_what_if
from rose.simulation.policies import (
    CONSTANTS,
    POLICIES,
    SETTINGS,
    check_options,
    setup_of,
    usual_value,
)
from rose.simulation.results import RunResult
from rose.simulation.run import SimulatedRun, run_all
from rose.simulation.scenario import Scenario
from rose.simulation.scenario_file import read_scenario
from rose.simulation.setups import SETUPS, setup_scenario, thousand_cards
from rose.simulation.tables import (
    effects,
    fleet_view,
    paper_rows,
    parts,
    plain,
    steps_of,
    view,
    what_if_view,
)
from rose.simulation.workloads.traffic import MAX_GAP_S, TraceTraffic
from slo import SloSpec, TargetError

DEFAULT_SETUPS = "frozen_lake-8b,frozen_lake-8b-dapo,alfworld-32b,alfworld-32b-dapo"
MOST_RUNS = 10_000
MOST_DAYS = 31.0
TTFT_S, TPOT_S = 2.0, 0.2
LEAST_HOST_BUSY = 0.05


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose sim` and its commands."""
    made = Parser(prog, description="Simulate a cluster with ROSE's own decisions.")
    commands = made.add_commands()
    for name, (what, add_arguments, run) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        add_arguments(command)
        command.set_defaults(run=run)
    return made


# ---- step by step ----


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Runs, their results, and the options that say where results are written."""

    asked: Sequence[SimulatedRun]
    results: Sequence[RunResult]
    args: argparse.Namespace

    @classmethod
    def of(cls, asked: Sequence[SimulatedRun], args: argparse.Namespace) -> "RunBatch":
        """Carry out all runs, at once as `--workers` and `--ray` say, and return their results as a
        batch.
        """
        return cls(asked, list(run_all(asked, args.workers, args.ray)), args)

    def show(
        self,
        label: Callable[[RunResult, int], str],
        title: str,
        extra: Callable[[Sequence[RunResult]], Table] | None = None,
    ) -> int:
        """Print tables of the runs and one more table, write JSON and plots as the options say, and
        return exit code 0.
        """
        shown = view(self.results, label, title)
        more = (extra(self.results),) if extra is not None else ()
        self.write((shown.tables[0], *more, *shown.tables[1:]))
        self.draw(self.results, self.args.plots)
        return 0

    def write(self, tables: tuple[Table, ...]) -> None:
        """Print tables, save the results as JSON if --out is given, and note runs that ended before
        their last step.
        """
        data = [plain(each) for each in self.results]
        write(View(data, (), tables), Format(self.args.output))
        self._save(self.args.out)
        for each in self.results:
            if missing := each.counts["steps_missing"]:
                run = f"{each.scenario} under {each.policy}"
                sys.stderr.write(
                    f"rose: {run}: {missing} steps were not done after {each.duration_s:.0f} s;"
                    " give more with --until-s\n"
                )

    def _save(self, path: Path | None) -> None:
        if path is None:
            return
        text = "[\n" + ",\n".join(each.to_json() for each in self.results) + "\n]\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {path} cannot be written: {error}") from error

    @staticmethod
    def draw(results: Sequence[RunResult], folder: Path | None) -> None:
        """Draw plots of the first seed's results into a folder, if one is given.

        Raises ConfigError.
        """
        if folder is None or not results:
            return
        try:
            save_plots([each for each in results if each.seed == results[0].seed], folder)
        except OSError as error:
            raise ConfigError(f"--plots {folder} cannot be written: {error}") from error


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_scenario_options(parser)
    parser.add_argument("--policy", default="rose", metavar="NAME", help="default rose")
    _add_run_options(parser, several=False)
    parser.set_defaults(workers=1, ray=None)


def _run(args: argparse.Namespace) -> int:
    setup_of(args.policy)
    asked = SimulatedRun(_scenario(args), args.policy, args.seed, _settings(args.set))
    title = f"{asked.scenario.name}, seed {args.seed}"
    outcome = RunBatch.of([asked], args)
    return outcome.show(lambda each, _: each.policy, title, lambda results: steps_of(results[0]))


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_scenario_options(parser)
    what = f"the first one is what others are compared with; default {','.join(POLICIES)}"
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="A,B", help=what)
    _add_run_options(parser, several=True)


def _compare(args: argparse.Namespace) -> int:
    names = [name for name in args.policies.split(",") if name]
    if not names:
        raise ConfigError("--policies names none; give at least one")
    for name in names:
        setup_of(name)
    scenario, settings, seeds = _scenario(args), _settings(args.set), _seeds(args)
    several = len(seeds) > 1
    asked = [SimulatedRun(scenario, name, seed, settings) for seed in seeds for name in names]
    return RunBatch.of(asked, args).show(
        lambda each, _: f"{each.policy} (seed {each.seed})" if several else each.policy,
        f"{scenario.name}, seeds 0 to {len(seeds) - 1}" if several else f"{scenario.name}, seed 0",
        lambda results: parts(results, scenario),
    )


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    _add_scenario_options(parser)
    parser.add_argument("--policy", default="rose", metavar="NAME", help="default rose")
    what = f"constants {', '.join(CONSTANTS)}; settings {', '.join(SETTINGS)}"
    parser.add_argument("--vary", action="append", default=[], metavar="NAME=A,B,C", help=what)
    what = "each constant alone, so much less and more than it is; not with --vary"
    parser.add_argument("--around", type=float, metavar="SHARE", help=what)
    _add_run_options(parser, several=True)


def _sweep(args: argparse.Namespace) -> int:
    setup_of(args.policy)
    scenario, settings, seeds = _scenario(args), _settings(args.set), _seeds(args)
    grid = _grid(args)
    asked = [
        SimulatedRun(scenario, args.policy, seed, {**settings, **each})
        for each in grid
        for seed in seeds
    ]
    if len(asked) > MOST_RUNS:
        raise ConfigError(f"--vary makes {len(asked)} runs; a sweep has at most {MOST_RUNS}")

    def label(_: object, at: int) -> str:
        mine = grid[at // len(seeds)]
        said = " ".join(f"{name}={value:g}" for name, value in mine.items()) or "as it is"
        return f"{said} (seed {asked[at].seed})" if len(seeds) > 1 else said

    return RunBatch.of(asked, args).show(
        label,
        f"{scenario.name}, policy {args.policy}",
        (lambda results: effects(results, grid, len(seeds))) if args.around is not None else None,
    )


def _grid(args: argparse.Namespace) -> list[dict[str, float]]:
    """Return, for each run of a sweep, the constants that it changes. Raises ConfigError."""
    if (args.around is None) == (not args.vary):
        raise ConfigError("give either --vary NAME=A,B,C or --around SHARE")
    if args.around is None:
        varied = dict(_values(word) for word in args.vary)
        return [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    if not 0 < args.around < 1:
        raise ConfigError(f"--around is {args.around}; give a share above 0 and below 1")
    grid: list[dict[str, float]] = [{}]
    for name in CONSTANTS:
        usual = usual_value(name)
        grid += ({name: usual * (1 + change)} for change in (-args.around, args.around))
    return grid


def _add_paper(parser: argparse.ArgumentParser) -> None:
    what = f"default {DEFAULT_SETUPS}; there are {', '.join(SETUPS)}"
    parser.add_argument("--setups", default=DEFAULT_SETUPS, metavar="A,B", help=what)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="each; default 3")
    what = "requests of users as a multiple of the usual ones; default 1"
    parser.add_argument("--load", type=float, default=1.0, metavar="X", help=what)
    _add_scale_option(parser)
    _add_run_options(parser, several=True)


def _paper(args: argparse.Namespace) -> int:
    names = [name for name in args.setups.split(",") if name]
    for name in names:
        if name not in SETUPS:
            raise ConfigError(f"there is no set-up {name!r}; choose from {', '.join(SETUPS)}")
    if args.steps < 1 or not 0 < args.load < inf:
        raise ConfigError("--steps: at least 1, --load: above 0")
    settings, seeds, scale = _settings(args.set), _seeds(args), _scale(args)
    scenarios = [setup_scenario(name, args.steps, args.load, scale) for name in names]
    asked = [
        SimulatedRun(scenario, policy, seed, settings)
        for scenario in scenarios
        for policy in POLICIES
        for seed in seeds
    ]
    outcome = RunBatch.of(asked, args)
    tables: list[Table] = []
    for name, scenario in zip(names, scenarios, strict=True):
        mine = [
            each
            for each, run in zip(outcome.results, asked, strict=True)
            if run.scenario is scenario
        ]
        by_policy = {p: [each for each in mine if each.policy == p] for p in POLICIES}
        shown = view(mine, lambda each, _: each.policy, scenario.name).tables
        tables += (shown[0], parts(mine, scenario), paper_rows(name, by_policy), *shown[1:])
        outcome.draw(mine, args.plots / name if args.plots is not None else None)
    outcome.write(tuple(tables))
    return 0


# ---- fluid ----


def _add_what_if(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    trace = "users' requests, CSV in the Azure LLM format"
    promised = "promised to users; default"
    busy = MaxHostBusy().share
    add("--trace", type=Path, required=True, metavar="FILE", help=trace)
    add("--gpus", type=int, required=True, metavar="N", help="that serve them")
    add("--model", required=True, help="that they serve: 8b, 32b or 70b")
    add("--guest", default="8b", metavar="MODEL", help="of the rollouts; default 8b")
    add("--card", default="h200", help="h200 or h100; default h200")
    add("--engine", default="vllm", help="vllm or sglang; default vllm")
    add("--cards", type=int, metavar="N", help="of one engine; default: the fewest")
    add("--ttft-s", type=float, default=TTFT_S, metavar="S", help=f"{promised} {TTFT_S:g}")
    add("--tpot-s", type=float, default=TPOT_S, metavar="S", help=f"{promised} {TPOT_S:g}")
    what = "of a busy host's slack that is lent; default 0: idle time alone"
    add("--slack-share", type=_share, default=0.0, metavar="SHARE", help=what)
    what = f"beside busier hosts nothing is lent, 1: no limit; default {busy:g}"
    add("--max-host-busy", type=_share, default=busy, metavar="SHARE", help=what)
    add("--context", type=int, default=4_096, metavar="TOKENS", help="of a rollout; default 4096")
    what = "a trace with longer gaps is refused; default 3600"
    add("--max-gap-s", type=float, default=MAX_GAP_S, metavar="S", help=what)
    parser.add_argument("--plots", type=Path, metavar="DIR", help="folder for what-if.png")
    add_output_options(parser)


def _what_if(args: argparse.Namespace) -> int:
    trace = TraceTraffic(args.trace, max_gap_s=args.max_gap_s)
    answer = what_if(_question(args), trace)
    if args.plots is not None:
        save_what_if(answer, args.plots)
    write(what_if_view(answer), Format(args.output))
    return 0


def _question(args: argparse.Namespace) -> WhatIfQuestion:
    try:
        slo = SloSpec(args.model, args.ttft_s, args.tpot_s)
    except TargetError as error:
        raise ConfigError(f"--ttft-s, --tpot-s: {error}") from error
    hold = None
    if args.max_host_busy < 1:
        usual = MaxHostBusy()
        resume = args.max_host_busy * usual.resume / usual.share
        if args.max_host_busy < LEAST_HOST_BUSY:
            raise ConfigError(
                f"--max-host-busy is {args.max_host_busy:g}; give {LEAST_HOST_BUSY:g} to 1"
            )
        hold = MaxHostBusy(share=args.max_host_busy, resume=round(resume, 3))
    return WhatIfQuestion(
        gpus=args.gpus,
        model=args.model,
        slo=slo,
        guest=args.guest,
        card=args.card,
        engine=args.engine,
        cards=args.cards,
        slack_share=args.slack_share,
        hold=hold,
        context=args.context,
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=float, default=1.0, metavar="N", help="default 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="folder for fleet.png")
    add_output_options(parser)


def _fleet(args: argparse.Namespace) -> int:
    if not 0 < args.days <= MOST_DAYS:
        raise ConfigError(f"--days is {args.days}; give more than 0, at most {MOST_DAYS:g}")
    spec = thousand_cards(args.days)
    alone = run_fleet(spec, args.seed, borrows=False)
    borrowing = run_fleet(spec, args.seed)
    if args.plots is not None:
        save_fleet(borrowing, args.plots)
    write(fleet_view(alone, borrowing), Format(args.output))
    return 0


# ---- options ----


def _add_scenario_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scenario", metavar="SCENARIO", help=f"a file, or a set-up: {', '.join(SETUPS)}"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="training steps to run")
    parser.add_argument("--until-s", type=float, metavar="S", help="end there at the latest")
    _add_scale_option(parser)


def _add_scale_option(parser: argparse.ArgumentParser) -> None:
    what = "a set-up with so much of its cards, batch and users: 0.25 is a quarter"
    parser.add_argument("--scale", type=float, metavar="X", help=what)


def _scale(args: argparse.Namespace) -> float:
    scale = 1.0 if args.scale is None else float(args.scale)
    if not 0 < scale < inf:
        raise ConfigError(f"--scale is {args.scale}; give a share above 0")
    return scale


def _add_run_options(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Add the options for seeds, constants, output files and parallel runs."""
    if several:
        parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1")
        parser.add_argument(
            "--workers", type=int, metavar="N", help="runs at once; default: one a core"
        )
        what = "run on Ray: a cluster's address, or a local one"
        parser.add_argument("--ray", nargs="?", const="local", metavar="ADDRESS", help=what)
    else:
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    what = "a constant or setting other than the usual"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=what)
    parser.add_argument("--out", type=Path, metavar="FILE", help="results as JSON as well")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="folder for pictures of steps, use, SLO and tail"
    )
    add_output_options(parser)


def _scenario(args: argparse.Namespace) -> Scenario:
    """Return the scenario that parsed options name: a file's or a set-up's, with their changes.

    Raises ConfigError.
    """
    name, scale = str(args.scenario), _scale(args)
    if name in SETUPS:
        scenario = setup_scenario(name, scale=scale)
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
        if not 0 < args.until_s < inf:
            raise ConfigError(f"--until-s is {args.until_s}; give a time above 0")
        scenario = replace(scenario, until_s=args.until_s)
    return scenario


def _settings(words: Sequence[str]) -> dict[str, float]:
    """Return the numbers of all `--set NAME=VALUE`, by name. Raises ConfigError."""
    options: dict[str, float] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word}: write NAME=VALUE")
        options[name] = _number(value, f"--set {word}")
    check_options(options)
    return options


def _values(word: str) -> tuple[str, tuple[float, ...]]:
    """Return name and values of one `--vary NAME=A,B,C`. Raises ConfigError."""
    name, equals, values = word.partition("=")
    if not equals or not values:
        raise ConfigError(f"--vary {word}: write NAME=A,B,C")
    found = tuple(_number(value, f"--vary {word}") for value in values.split(","))
    check_options({name: found[0]})
    return name, found


def _seeds(args: argparse.Namespace) -> range:
    """Return the seeds 0 to N-1 of `--seeds N`. Raises ConfigError."""
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
    if not isfinite(value):
        raise ConfigError(f"{where}: {text} is no finite number")
    return value


Adds = Callable[[argparse.ArgumentParser], None]
Runs = Callable[[argparse.Namespace], int]
COMMANDS: Mapping[str, tuple[str, Adds, Runs]] = MappingProxyType(
    {
        "run": ("run one scenario under one policy", _add_run, _run),
        "compare": ("run one scenario under several policies", _add_compare, _compare),
        "sweep": (
            "run one scenario with other constants, several runs at once",
            _add_sweep,
            _sweep,
        ),
        "what-if": (
            "say what lending would gain and cost, by a trace of your users",
            _add_what_if,
            _what_if,
        ),
        "fleet": (
            "run a fleet of 1,000 cards for days, by means instead of steps",
            _add_fleet,
            _fleet,
        ),
        "paper": (
            "run the ROSE paper's set-ups, and show its rows beside ours",
            _add_paper,
            _paper,
        ),
    }
)
