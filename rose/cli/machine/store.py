"""`rose store backup|show|restore`: back up a scheduler's store to one file, and restore it.

Exit code 0 when it is done; 2, with one line, when it is not: nothing is half done then, or the
store refuses to start a scheduler and says so.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from rose.command_line.output import say
from rose.command_line.parser import Parser
from rose.errors import ConfigError
from rose.scheduler.persistence import load
from rose.scheduler.restore import Restored, restore, take_backup
from rose.store import Store, StoreName, add_store_options, open_store, taken_store
from rose.store.backup_file import Backup, read_backup, write_backup

Result = TypeVar("Result")


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose store` and its commands."""
    made = Parser(prog, description="Back up a scheduler's store, and restore it.")
    commands = made.add_commands()
    backup = commands.add_parser("backup", help="write all of it to a file, while schedulers run")
    add_store_options(backup)
    backup.add_argument("file", type=Path, metavar="FILE", help="a new one")
    backup.set_defaults(run=_backup)
    show = commands.add_parser("show", help="check a backup, and say what is in it")
    show.add_argument("file", type=Path, metavar="FILE")
    show.set_defaults(run=_show)
    what = "write a backup into a store that no scheduler uses"
    back = commands.add_parser("restore", help=what)
    add_store_options(back)
    back.add_argument("file", type=Path, metavar="FILE", help="of `rose store backup`")
    back.add_argument("--replace", action="store_true", help="over what the store holds")
    back.set_defaults(run=_restore)
    return made


def _backup(args: argparse.Namespace) -> int:
    name = taken_store(args)
    if not (name.is_etcd or Path(name.name).is_file()):
        raise ConfigError(f"{name.name} is no file; give the --store that the scheduler has")
    taken = _with_store(name, take_backup)
    size = write_backup(args.file, taken)
    say(f"{args.file}: {_inside(taken)}, {size} bytes")
    return 0


def _show(args: argparse.Namespace) -> int:
    backup = read_backup(args.file)
    saved = load(backup.entries)
    say(f"{args.file} is whole: {_inside(backup)}, written by ROSE {backup.release}")
    mode = saved.mode.value if saved.mode else "never set"
    say(f"stop {mode}; {len(saved.policies)} policies; {len(saved.epochs)} replicas had leases")
    for job in saved.jobs:
        newest = max((each.version for each in saved.versions if each.job == job.job), default=0)
        say(f"job {job.job} at version {newest}{', ended' if job.ended else ''}")
    return 0


def _restore(args: argparse.Namespace) -> int:
    backup = read_backup(args.file)

    async def work(store: Store) -> Restored:
        return await restore(store, backup, replace_all=args.replace)

    done = _with_store(taken_store(args), work)
    say(f"restored {_inside(backup)}; leases have epochs above {done.epoch_floor}")
    if done.jobs:
        say(f"start the trainers of {done.jobs} jobs anew: each begins with a base of its weights")
    say(f"nothing is lent (stop: {done.stop.value}): start schedulers, then `rose resume`")
    return 0


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
