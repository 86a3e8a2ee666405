"""The `rose` command and its parser: one line for a person, an exit code for a script.

Errors are one line, and for a typo the nearest known word is suggested. `rose.cli.exit_codes` has
the codes.
"""

import argparse
import importlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from rose.cli.cluster.commands import add_reading_commands
from rose.cli.cluster.explain import add_explain_command
from rose.cli.cluster.policy import add_policy_commands
from rose.cli.cluster.stops import add_stop_commands
from rose.cli.completion import add_completion_command
from rose.cli.exit_codes import ExitCode, code_of
from rose.command_line.parser import Parser
from rose.errors import RoseError
from rose.release import release

# Commands with options of their own: everything after the name goes to their main(argv).
PROCESSES = {
    "scheduler": ("rose.main.scheduler", "lease what nodes offer to jobs"),
    "gateway": ("rose.main.gateway", "route rollout turns to leased replicas"),
    "node": ("rose.main.node", "guard the hosts of this machine and run its guests"),
    "front": (
        "rose.main.front",
        "answer the control calls of vLLM and SGLang for a trainer",
    ),
    "publish": (
        "rose.main.publish",
        "publish checkpoints that a trainer saves, as they come",
    ),
    "profile": ("rose.profile.main", "measure how long an engine's steps take"),
    "relay": (
        "rose.weight_distribution.relay",
        "pass weights on inside a cluster, without a scheduler",
    ),
    "weights": (
        "rose.cli.machine.weights",
        "write, apply and check changes of checkpoints",
    ),
    "certs": ("rose.cli.machine.certs", "make a CA for development, issue and show certificates"),
    "token": ("rose.cli.machine.token", "make keys and job tokens for callers of gateways"),
    "store": ("rose.cli.machine.store", "back up and restore the store of schedulers"),
    "compare": (
        "rose.cli.cluster.compare",
        "measure what lending costs hosts",
    ),
    "audit": ("rose.cli.cluster.audit", "check and read the audit log of a scheduler or node"),
    "usage": ("rose.cli.cluster.usage", "say what hosts lent to whom"),
    "support-bundle": (
        "rose.cli.machine.support_bundle",
        "collect what help needs, no secrets",
    ),
    # Part of the repository alone, with the benchmarks.
    "demo": ("bench.demo.cli", "run the whole loop on this machine, report what it proves"),
    "sim": ("rose.simulation.commands.main", "simulate a cluster with ROSE's own decisions"),
    "doctor": (
        "rose.cli.machine.doctor",
        "say what is missing, and how to mend it",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names may have characters that the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(words)
    except RoseError as error:
        return _complain(str(error), code_of(error))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of the output left (`rose status | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        return _complain(_what_to_install(error.name), ExitCode.BAD_INPUT)
    except Exception as error:  # noqa: BLE001 -- the last resort: no traceback reaches a user
        return _complain(
            f"unexpected {type(error).__name__}: {_first_line(error)}; the traceback is in"
            f" {_keep_traceback(error)}, please report it",
            ExitCode.FOUND,
        )


def _what_to_install(module: str | None) -> str:
    if module is not None and module.partition(".")[0] == "bench":
        return "the demo is not part of the package: clone the repository and run `make demo` in it"
    return (
        f"{module} is not installed; install rose-rollout with the extra that this command needs"
        " (control, replica, trainer, cuda or nccl)"
    )


def _run(words: Sequence[str]) -> int:
    if words and words[0] in PROCESSES:
        module = importlib.import_module(PROCESSES[words[0]][0])
        return int(module.main(words[1:]))
    args = make_parser().parse_args(words)
    return int(args.run(args))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `rose`, without the options of processes."""
    codes = "; ".join(f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode)
    parser: argparse.ArgumentParser = Parser(
        prog="rose",
        description="Lend idle LLM serving capacity to RL rollouts.",
        epilog=f"exit codes: {codes}",
    )
    parser.add_argument("--version", action="version", version=f"rose {release()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, what) in PROCESSES.items():
        commands.add_parser(name, help=what)
    add_reading_commands(commands)
    add_policy_commands(commands)
    add_stop_commands(commands)
    add_explain_command(commands)
    add_completion_command(commands)
    return parser


def _complain(what: str, code: int) -> int:
    sys.stderr.write(f"rose: {what}\n")
    return code


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]


def _keep_traceback(error: Exception) -> Path:
    descriptor, path = tempfile.mkstemp(prefix="rose-error-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return Path(path)


if __name__ == "__main__":
    sys.exit(main())
