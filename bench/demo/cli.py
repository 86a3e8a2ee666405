"""`rose demo` and `rose demo verify DIR`: options, settings and dispatch."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from bench.common.engines import SGLANG_PYTHON, check_sglang_python
from rose.command_line.parser import Parser
from rose.errors import RoseError

TrainerControl = Literal["shuffled-advantage", "lr0", "corrupt-chunk", "drop-token"]
Control = Literal[TrainerControl, "wrong-chunk", "stale-guest", "naive"]
CONTROLS: tuple[Control, ...] = get_args(Control)

Engine = Literal["vllm", "sglang"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
# These replace a worker of vLLM's.
OF_VLLM: tuple[Control, ...] = ("stale-guest", "wrong-chunk")

# The acceptance run continues until it has taken so many steps, however slow the machine.
DEFAULT_STEPS = 60
MIN_STEPS = 4
HELD_OUT_MAPS = 512
JOB = "frozen-lake"
MAX_JOBS = 2
MAX_STEPS = 1_000
MAX_SEED = 9_999
# The demo takes consecutive ports from its base on.
PORTS_TAKEN = 32
MIN_PORT = 1_024
MAX_PORT = 65_535
DEFAULT_OUT = Path("out/demo")
EPILOG = """\
The demo runs the whole loop on this machine: a host engine under bursty load, a guest beside it on
the same core, a dedicated one, and a trainer whose every step publishes new weights to both.
For a minute the guest lends the host's idle time; it is revoked in mid-turn, then killed.
--accept measures instead: every claim of docs/demo.md, in about six minutes.
--jobs 2 trains two policies that have nothing but the guest, and share its time.
All end with report.md, report.json and pictures in --out, all computed from raw records there.
Exit code: 0 when no claim fails, 1 when one does (of --control: when none does), 2 for bad input.
"""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One run of the demo; every field is an option of `rose demo`.

    Without `accept`, `control` and `compare` it is the quickstart: the loop and its faults, seen
    once; of several `jobs`, how they share the guest. A control is an acceptance run that breaks
    one thing, as short as its claim allows.
    Raises `RoseError` when a value cannot be run.
    """

    out: Path
    seed: int = 0
    steps: int = DEFAULT_STEPS
    accept: bool = False
    trace: Path | None = None
    long_turns: bool = False
    control: Control | None = None
    compare: bool = False
    port_base: int = 18_000
    host_model: Path | None = None
    # One arm for the whole run instead of the experiment: what `--compare` runs in pairs.
    only: Literal["leased", "frozen"] | None = None
    jobs: int = 1
    host: Engine = "vllm"
    guest: Engine = "vllm"
    sglang_python: Path = SGLANG_PYTHON
    # Ranks of the host and of the guest; the dedicated replica has one.
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        self._check_engines()
        if not MIN_STEPS <= self.steps <= MAX_STEPS:
            raise RoseError(f"--steps {self.steps}: choose {MIN_STEPS} to {MAX_STEPS}")
        if self.compare and (self.control or self.accept):
            raise RoseError("--compare goes with neither --accept nor --control; choose one")
        if not 1 <= self.jobs <= MAX_JOBS:
            raise RoseError(f"--jobs {self.jobs}: choose 1 or {MAX_JOBS}")
        if self.jobs > 1 and not self.quickstart:
            raise RoseError("--jobs goes with none of --accept, --control and --compare")
        # `--compare` trains on the next seeds, too, and so does each further job.
        most = MAX_SEED - 9 if self.compare else MAX_SEED - self.jobs + 1
        if not 0 <= self.seed <= most:
            raise RoseError(f"--seed {self.seed}: choose 0 to {most}")
        if not MIN_PORT <= self.port_base <= MAX_PORT - PORTS_TAKEN:
            raise RoseError(
                f"--port-base {self.port_base}: choose {MIN_PORT} to {MAX_PORT - PORTS_TAKEN}"
            )
        if self.trace is not None and not self.trace.is_file():
            raise RoseError(f"--trace {self.trace}: no such file")
        if self.host_model is not None and not (self.host_model / "config.json").is_file():
            raise RoseError(
                f"--host-model {self.host_model}: no config.json there; name a model directory"
            )

    def _check_engines(self) -> None:
        if "sglang" in (self.host, self.guest):
            check_sglang_python(self.sglang_python)
        if self.guest != "vllm" and self.control in OF_VLLM:
            raise RoseError(f"--control {self.control} breaks a vLLM guest; leave out --guest")

    @property
    def quickstart(self) -> bool:
        """True if the run only shows the loop."""
        return not (self.accept or self.control or self.compare or self.only)

    @property
    def job_names(self) -> tuple[str, ...]:
        """The training runs, each a job of its own."""
        if self.jobs == 1:
            return (JOB,)
        return tuple(f"{JOB}-{number}" for number in range(1, self.jobs + 1))

    @property
    def held_out_maps(self) -> int:
        """Number of maps on which the policy is evaluated before and after training."""
        learning = self.control in (None, "lr0", "shuffled-advantage")
        return HELD_OUT_MAPS if learning and not self.quickstart else 0

    def as_record(self) -> dict[str, object]:
        """Return the settings as JSON values, for `run.json`."""
        given = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(self).items()
        }
        return given | {"quickstart": self.quickstart}


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out `rose demo …` and return the exit code. Raises RoseError for bad input."""
    args = parser().parse_args(argv)
    if args.demo_command == "verify":
        return _verify(args.folder)
    settings = settings_of(args)
    # Imported here: a bad option must not wait for an engine's libraries to load.
    from bench.demo.run import run_demo

    if settings.compare:
        from bench.demo.plan import run_compare

        return run_compare(settings, run_demo)
    return run_demo(settings)


def parser(prog: str = "rose demo") -> Parser:
    """Return the parser of `rose demo`."""
    parser = Parser(
        prog,
        description="Run the whole loop on this machine, and report what it proves.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_experiment(parser)
    _add_machine(parser)
    commands = parser.add_subparsers(dest="demo_command", metavar="verify DIR")
    verify = commands.add_parser(
        "verify", help="recompute the report of a run from its raw records and compare"
    )
    verify.add_argument("folder", type=Path, metavar="DIR", help="the --out of a run")
    return parser


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--accept", action="store_true", help="the acceptance run: every claim, measured")
    what = f"least training steps of --accept and --compare (default {DEFAULT_STEPS})"
    add("--steps", type=int, default=DEFAULT_STEPS, metavar="N", help=what)
    add("--seed", type=int, default=0, metavar="N", help="seed of everything (default 0)")
    add("--trace", type=Path, metavar="FILE", help="load the host from this Azure trace (CSV)")
    what = f"training runs of equal weight that share what is borrowed (1 or {MAX_JOBS})"
    add("--jobs", type=int, default=1, metavar="N", help=what)
    add("--long-turns", action="store_true", help="every turn has 32 tokens or more")
    add("--control", choices=CONTROLS, help="accept with one thing broken: a claim must fail")
    what = "train with and without the guest on paired seeds, compare where they end"
    add("--compare", action="store_true", help=what)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default_base = DemoSettings.__dataclass_fields__["port_base"].default
    add("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help=f"default {DEFAULT_OUT}")
    what = f"first of the loopback ports used (default {default_base})"
    add("--port-base", type=int, default=default_base, metavar="N", help=what)
    add("--host-model", type=Path, metavar="DIR", help="serve this model instead of a tiny one")
    add("--host", choices=ENGINES, default="vllm", help="the host's engine (default vllm)")
    add("--guest", choices=ENGINES, default="vllm", help="the replicas' engine (default vllm)")
    add(
        "--tensor-parallel-size",
        dest="tensor_parallel",
        type=int,
        choices=(1, 2),
        default=1,
        help="ranks of host and guest, a core each (default %(default)s)",
    )
    what = f"interpreter that has SGLang (default {SGLANG_PYTHON})"
    add("--sglang-python", type=Path, default=SGLANG_PYTHON, metavar="FILE", help=what)


def settings_of(args: argparse.Namespace) -> DemoSettings:
    """Return the settings of parsed arguments. Raises RoseError for values that cannot run."""
    given = {
        field.name: getattr(args, field.name)
        for field in fields(DemoSettings)
        if field.name != "only"
    }
    return DemoSettings(**given)


def _verify(folder: Path) -> int:
    """Compare the report with its records; return 1 if a field differs."""
    # Imported here: the pictures' library is slow to load, and `rose --help` must not be.
    from bench.demo.report.report import verify

    differences = verify(folder)
    for difference in differences:
        sys.stdout.write(f"{difference}\n")
    sys.stdout.write(
        f"{folder}: {len(differences)} fields differ from the raw records\n"
        if differences
        else f"{folder}: every field of the report follows from the raw records\n"
    )
    return int(bool(differences))
