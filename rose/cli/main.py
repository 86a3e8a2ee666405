"""The `rose` command: a line for a person, an exit code for a script (`rose.cli.exit_codes`).

COMMANDS ──► module of the first word, imported alone ──► main(words) of a process
                                                      └─► parser("rose NAME") ──► args.run(args)
"""

import argparse
import importlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from rose.cli.exit_codes import ExitCode, code_of
from rose.command_line.parser import Parser
from rose.errors import RoseError
from rose.release import release

COMMANDS: Final = {
    "init": ("rose.cli.machine.init", "write the files that start ROSE on this machine"),
    "scheduler": ("rose.main.scheduler", "lease what nodes offer to jobs"),
    "gateway": ("rose.main.gateway", "route rollout turns to leased replicas"),
    "node": ("rose.main.node", "guard the hosts of this machine and run its guests"),
    "front": ("rose.main.front", "answer the control calls of vLLM and SGLang for a trainer"),
    "publish": ("rose.main.publish", "publish checkpoints that a trainer saves, as they come"),
    "profile": ("rose.profile.main", "measure how long an engine's steps take"),
    "relay": (
        "rose.weight_distribution.relay",
        "pass weights on inside a cluster, without a scheduler",
    ),
    "weights": ("rose.cli.machine.weights", "write, apply and check changes of checkpoints"),
    "certs": (
        "rose.cli.machine.credentials",
        "make a CA for development, issue and show certificates",
    ),
    "token": ("rose.cli.machine.credentials", "make keys and job tokens for callers of gateways"),
    "plugin": ("rose.cli.machine.plugin", "bring the plugin into hosts whose images lack it"),
    "store": ("rose.cli.machine.store", "back up and restore the store of schedulers"),
    "advise": ("rose.cli.advise", "say what lending would bring here, before ROSE is installed"),
    "compare": ("rose.cli.cluster.compare", "measure what lending costs hosts"),
    "audit": ("rose.cli.cluster.audit", "check and read the audit log of a scheduler or node"),
    "usage": ("rose.cli.cluster.usage", "say what hosts lent to whom"),
    "support-bundle": ("rose.cli.machine.support_bundle", "collect what help needs, no secrets"),
    # The demo is in the repository alone, with the benchmarks.
    "demo": ("bench.demo.cli", "run the whole loop on this machine, report what it proves"),
    "sim": ("rose.simulation.commands", "simulate a cluster with ROSE's own decisions"),
    "doctor": ("rose.cli.machine.doctor", "say what is missing, and how to mend it"),
    "status": (
        "rose.cli.cluster.fleet",
        "everything right now: nodes, replicas, leases, jobs, and troubles",
    ),
    "nodes": (
        "rose.cli.cluster.fleet",
        "hosts' latency against its target, and what each node lends",
    ),
    "replicas": ("rose.cli.cluster.fleet", "who has each replica, what it does, and why"),
    "top": (
        "rose.cli.cluster.top",
        "live: hosts' latency against its target, what each guest does, and why",
    ),
    "jobs": ("rose.cli.cluster.jobs", "list, show, end or drop registered jobs"),
    "policy": ("rose.cli.cluster.policy", "say what may be lent, where and when"),
    "hold": ("rose.cli.cluster.stops", "grant no new leases; those that live are kept"),
    "drain": ("rose.cli.cluster.stops", "grant no new leases and take back those that live"),
    "resume": (
        "rose.cli.cluster.stops",
        "end a hold, a drain or a stop: policies alone decide again",
    ),
    "stop-all": (
        "rose.cli.cluster.stops",
        "end all lending and all guests, and see them gone; `rose resume` ends it",
    ),
    "harvest": ("rose.cli.cluster.stops", "say how much may be lent, beside policies"),
    "revoke": ("rose.cli.cluster.stops", "end a replica's lease now"),
    "kill": ("rose.cli.cluster.stops", "end all guests of a node now, whatever else is down"),
    "unkill": ("rose.cli.cluster.stops", "let them start again"),
    "explain": ("rose.cli.cluster.explain", "say where turns were placed lately, and why"),
    "completion": ("rose.cli.completion", "print a script that completes `rose`"),
}
"""Module and help text of each command.

The module has `parser`; the module of a process has its own `main` too.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `rose` command of these words; print errors as one line and return the exit code."""
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
        # The reader of the output has ended (`rose status | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        return _complain(_what_to_install(error.name), ExitCode.BAD_INPUT)
    except Exception as error:  # noqa: BLE001 -- the last resort: no traceback reaches a user
        line = (str(error).splitlines() or ["no message"])[0]
        return _complain(
            f"unexpected {type(error).__name__}: {line}; the traceback is in"
            f" {_keep_traceback(error)}, please report it",
            ExitCode.FOUND,
        )


def _run(words: list[str]) -> int:
    known = words and words[0] in COMMANDS
    name = words[0] if known else str(make_parser().parse_args(words).command)
    module = _module(name)
    if hasattr(module, "main"):
        return int(module.main(words[1:]))
    args = parser_of(name).parse_args(words[1:])
    return int(args.run(args))


def _what_to_install(module: str | None) -> str:
    if module is not None and module.partition(".")[0] == "bench":
        return "the demo is not part of the package: clone the repository and run `make demo` in it"
    return (
        f"{module} is not installed; install rose-rollout with the extra that this command needs"
        " (control, replica, trainer, cuda or nccl)"
    )


def _complain(what: str, code: int) -> int:
    # Imported here: most commands end without an error.
    from rose.logs.process_log import complain

    complain("rose", what)
    return code


def _keep_traceback(error: Exception) -> Path:
    descriptor, path = tempfile.mkstemp(prefix="rose-error-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return Path(path)


# ---- parsers ----


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `rose` that knows the names of all commands, without their options."""
    codes = "; ".join(f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode)
    parser: argparse.ArgumentParser = Parser(
        prog="rose",
        description="Lend idle LLM serving capacity to RL rollouts.",
        epilog=f"exit codes: {codes}",
    )
    parser.add_argument("--version", action="version", version=f"rose {release()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what)
    return parser


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command.

    Raises ModuleNotFoundError if the extra that it needs is not installed.
    """
    parser: argparse.ArgumentParser = _module(name).parser(f"rose {name}")
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser of `rose` with the options of all commands whose extras are installed."""
    parser = make_parser()
    commands = commands_of(parser)
    for name in COMMANDS:
        try:
            commands[name] = parser_of(name)
        except ModuleNotFoundError:  # of an extra that this environment lacks, or the demo
            continue
    return parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands by name; changing the dictionary changes it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def every_command(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the words of each command and nested command, such as `policy get`, with its parser, in
    the order of the help.
    """
    for name, child in commands_of(parser).items():
        words = (*path, name)
        yield " ".join(words), child
        yield from every_command(child, words)


def _module(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name][0])


if __name__ == "__main__":
    sys.exit(main())
