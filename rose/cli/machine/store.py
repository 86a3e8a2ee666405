"""`rose store backup|show|restore`: back up a scheduler's store to one file, and restore it.

Exit code 0 when it is done; 2, with one line, when it is not: nothing is half done then, or the
store refuses to start a scheduler and says so.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from rose.command_line.parser import Parser
from rose.errors import ConfigError
from rose.scheduler.persistence import load
from rose.scheduler.restore import Restored, restore, take_backup
from rose.store import Store, StoreName, add_store_options, open_store, taken_store
from rose.store.backup_file import Backup, read_backup, write_backup

Result = TypeVar("Result")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Raises RoseError with one line."""
    args = _parser().parse_args(argv)
    return int(args.work(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="rose store", description="Back up a scheduler's store, and restore it.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    backup = commands.add_parser(
        "backup",
        help="write all of it to a file, while schedulers run",
    )
    add_store_options(backup)
    backup.add_argument("file", type=Path, metavar="FILE", help="a new one")
    backup.set_defaults(work=_backup)
    show = commands.add_parser(
        "show",
        help="check a backup, and say what is in it",
    )
    show.add_argument("file", type=Path, metavar="FILE")
    show.set_defaults(work=_show)
    back = commands.add_parser(
        "restore",
        help="write a backup into a store that no scheduler uses",
    )
    add_store_options(back)
    back.add_argument("file", type=Path, metavar="FILE", help="of `rose store backup`")
    back.add_argument("--replace", action="store_true", help="over what the store holds")
    back.set_defaults(work=_restore)
    return parser


def _backup(args: argparse.Namespace) -> int:
    name = taken_store(args)
    if not (name.is_etcd or Path(name.name).is_file()):
        raise ConfigError(f"{name.name} is no file; give the --store that the scheduler has")
    taken = _with_store(name, take_backup)
    size = write_backup(args.file, taken)
    return _say(f"{args.file}: {_inside(taken)}, {size} bytes")


def _show(args: argparse.Namespace) -> int:
    backup = read_backup(args.file)
    saved = load(backup.entries)
    _say(f"{args.file} is whole: {_inside(backup)}, written by ROSE {backup.release}")
    mode = saved.mode.value if saved.mode else "never set"
    _say(f"stop {mode}; {len(saved.policies)} policies; {len(saved.epochs)} replicas had leases")
    for job in saved.jobs:
        newest = max((each.version for each in saved.versions if each.job == job.job), default=0)
        _say(f"job {job.job} at version {newest}{', ended' if job.ended else ''}")
    return 0


def _restore(args: argparse.Namespace) -> int:
    backup = read_backup(args.file)

    async def work(store: Store) -> Restored:
        return await restore(store, backup, replace_all=args.replace)

    done = _with_store(taken_store(args), work)
    _say(f"restored {_inside(backup)}; leases have epochs above {done.epoch_floor}")
    if done.jobs:
        _say(f"start the trainers of {done.jobs} jobs anew: each begins with a base of its weights")
    return _say(f"nothing is lent (stop: {done.stop.value}): start schedulers, then `rose resume`")


def _inside(backup: Backup) -> str:
    when = datetime.fromtimestamp(backup.taken_s, UTC)
    return f"{len(backup.entries)} keys at revision {backup.revision} of {when:%Y-%m-%d %H:%M} UTC"


def _with_store(name: StoreName, work: Callable[[Store], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        store = open_store(name)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _say(line: str) -> int:
    sys.stdout.write(line + "\n")
    return 0
