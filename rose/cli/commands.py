"""The operator's subcommands: status, explain, harvest, revoke, kill, unkill."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rose.cli.client import DEFAULT_SCHEDULER, SchedulerClient
from rose.cli.explain import DEFAULT_GATEWAY, explain
from rose.errors import ConfigError
from rose.rpc import rose_pb2 as pb

if TYPE_CHECKING:
    # argparse offers this type to annotations only.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

KILL_FILE = "KILL"
MODES = {
    "off": pb.HARVEST_MODE_OFF,
    "hold": pb.HARVEST_MODE_HOLD,
    "drain": pb.HARVEST_MODE_HOLD_AND_DRAIN,
    "active": pb.HARVEST_MODE_ACTIVE,
}


def add_operator_commands(subparsers: "Subparsers") -> None:
    """Add them to the command line; `args.run` is what carries one out."""
    status = subparsers.add_parser("status", help="replicas, leases, hosts and guests right now")
    _add_scheduler(status)
    status.set_defaults(run=_status)

    why = subparsers.add_parser("explain", help="say where turns were placed lately, and why")
    why.add_argument("subject", metavar="TRAJECTORY", help="a session, or one turn's request id")
    why.add_argument(
        "--gateway", default=DEFAULT_GATEWAY, metavar="URL", help=f"default {DEFAULT_GATEWAY}"
    )
    why.set_defaults(run=_explain)

    harvest = subparsers.add_parser("harvest", help="say how much may be lent")
    harvest.add_argument("mode", choices=MODES, help="off and drain also end what is lent")
    harvest.add_argument("--replica", default="", metavar="R", help="only this one (default: all)")
    _add_scheduler(harvest)
    harvest.set_defaults(run=_harvest)

    revoke = subparsers.add_parser("revoke", help="end a replica's lease now")
    revoke.add_argument("replica", metavar="REPLICA")
    revoke.add_argument("--reason", default="operator", metavar="TEXT", help="for the event log")
    _add_scheduler(revoke)
    revoke.set_defaults(run=_revoke)

    for name, run, what in (
        ("kill", _kill, "end all guests of a node now, whatever else is down"),
        ("unkill", _unkill, "let them start again"),
    ):
        parser = subparsers.add_parser(name, help=what)
        parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the node's run folder")
        parser.set_defaults(run=run)


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scheduler",
        default=DEFAULT_SCHEDULER,
        metavar="HOST:PORT",
        help=f"default {DEFAULT_SCHEDULER}",
    )


def _status(args: argparse.Namespace) -> int:
    # Imported here: only this command draws tables.
    from rose.cli.status import show

    show(SchedulerClient(args.scheduler).snapshot())
    return 0


def _explain(args: argparse.Namespace) -> int:
    return explain(args.gateway, args.subject)


def _harvest(args: argparse.Namespace) -> int:
    released = SchedulerClient(args.scheduler).set_harvest(MODES[args.mode], args.replica)
    whom = args.replica or "all replicas"
    return _say(f"harvest of {whom}: {args.mode}; {released} leases are being released")


def _revoke(args: argparse.Namespace) -> int:
    epoch = SchedulerClient(args.scheduler).revoke(args.replica, args.reason)
    return _say(f"{args.replica}: lease of epoch {epoch} revoked")


def _kill(args: argparse.Namespace) -> int:
    # Imported here: only this command looks at processes.
    from rose.node.kill import end_guests

    file = _kill_file(args.folder)
    ended = end_guests(args.folder, file)
    _say(f"{file} is set: no guest starts until `rose unkill {args.folder}` takes it back")
    for guest in ended:
        _say(f"{guest.name} (process {guest.pid}) {guest.outcome}")
    return 0 if all(guest.gone for guest in ended) else 1


def _unkill(args: argparse.Namespace) -> int:
    file = _kill_file(args.folder)
    try:
        file.unlink()
    except FileNotFoundError:
        return _say(f"{file} was not set")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be removed ({error.strerror}); check its owner"
        ) from error
    return _say(f"{file} is gone: guests may start again")


def _kill_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the run folder of a node")
    return folder / KILL_FILE


def _say(line: str) -> int:
    sys.stdout.write(line + "\n")
    return 0
