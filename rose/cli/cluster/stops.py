"""Commands that stop and resume lending: hold, drain, resume, stop-all, revoke, kill, unkill.

`rose stop-all` returns when every node has confirmed and every guest is gone by its node's
measurement, or names the ones that are not or unknown. Without a scheduler it leaves the stop in
the store, where the next one reads it.
"""

import argparse
import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rose.cli.exit_codes import ExitCode
from rose.cli.options import add_dry_run, add_scheduler_options, client_of
from rose.command_line.output import Format, View, add_output_options, note, say, write
from rose.command_line.parser import Parser, nearest
from rose.errors import ConfigError, RefusedError, RoseError, UnavailableError
from rose.operate.client import PolicyClient
from rose.operate.fleet import WIRE_MODES, Fleet, Mode, ReplicaRow, fleet_of
from rose.operate.stop import STALE_AFTER_S, Proof, proof_of
from rose.rpc import rose_pb2 as pb
from rose.store.opening import StoreName, add_store_options, open_store, taken_store

KILL_FILE: Final = "KILL"
HARVEST: Final = {"off": Mode.OFF, "hold": Mode.HOLD, "drain": Mode.DRAIN, "active": Mode.ACTIVE}
STOPS: Final = {"hold": Mode.HOLD, "drain": Mode.DRAIN, "resume": Mode.ACTIVE}
POLL_S: Final = 0.1
# `reclaimDeadline` if no policy sets another.
DEADLINE_S: Final = 5.0
# Grace for the measurement of a guest that is gone by the deadline: its duty of a second is 0.
PROOF_S: Final = 2.0


def parser(prog: str) -> Parser:
    """Return the command-line parser of one command of this module, by the program's name."""
    made = Parser(prog)
    name = prog.split()[1]
    if name in ("kill", "unkill"):
        _add_folder(made, kills=name == "kill")
        return made
    match name:
        case "stop-all":
            made.set_defaults(run=_stop_all)
            what = (
                "wait no longer (default: the longest reclaimDeadline of all policies, 5 s without)"
            )
            made.add_argument("--within", type=_seconds, metavar="S", help=what)
        case "revoke":
            made.set_defaults(run=_revoke)
            made.add_argument("replica", metavar="REPLICA")
            made.add_argument(
                "--reason", default="operator", metavar="TEXT", help="for the event log"
            )
        case "harvest":
            made.set_defaults(run=_stop, stop=name)
            what = "off and drain also end what is lent"
            made.add_argument("mode", choices=tuple(HARVEST), help=what)
        case _:
            made.set_defaults(run=_stop, stop=name, mode=None)
    if name not in ("stop-all", "revoke"):
        what = "only this one (default: all)"
        made.add_argument("--replica", default="", metavar="R", help=what)
    add_dry_run(made)
    add_scheduler_options(made)
    if name == "stop-all":
        add_store_options(made, "of the scheduler, for when none answers: ")
        add_output_options(made)
    return made


def _add_folder(made: Parser, *, kills: bool) -> None:
    made.set_defaults(run=_kill if kills else _unkill)
    made.add_argument("folder", type=Path, metavar="RUN_DIR", help="the node's run folder")
    if kills:
        what = f"by when everything must be back (default {DEADLINE_S:g})"
        made.add_argument("--within", type=_seconds, default=DEADLINE_S, metavar="S", help=what)
    add_dry_run(made)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 600:
        raise argparse.ArgumentTypeError(f"{text} is no time of up to 600 s")
    return seconds


# ---- hold, drain, resume, harvest, revoke ----


def _stop(args: argparse.Namespace) -> int:
    client = client_of(args)
    mode = HARVEST[args.mode] if args.mode else STOPS[args.stop]
    what = f"{args.stop} of {args.replica or 'all replicas'}"
    what += f": {args.mode}" if args.mode else ""
    if args.dry_run:
        say(f"{what}: {_would(fleet_of(client.snapshot()), mode, args.replica)}")
        return ExitCode.DONE
    change = client.set_harvest if args.mode else client.stop
    say(f"{what}; {change(WIRE_MODES[mode], args.replica)} leases are being released")
    _look_for(client, args.replica)
    return ExitCode.DONE


def _look_for(client: PolicyClient, replica: str) -> None:
    """Print a note if no replica of this name exists now: the kept name may be a typo."""
    if not replica:
        return
    try:
        # Ask after the stop, so that the stop waits for nothing.
        names = [each.name for each in fleet_of(client.snapshot()).replicas]
    except UnavailableError:
        return
    if replica not in names:
        hint = nearest(replica, names)
        note(f"no replica {replica!r} is there now{hint}: it counts from when it is")


def _would(fleet: Fleet, mode: Mode, replica: str = "") -> str:
    guests = [r for r in fleet.replicas if r.is_guest and replica in ("", r.name)]
    leased = [guest for guest in guests if guest.lease is not None]
    if mode is Mode.ACTIVE:
        nodes = sum(node.capacity is None or node.capacity.would is mode for node in fleet.nodes)
        return f"policies alone would decide again; {nodes} of {len(fleet.nodes)} nodes would lend"
    if mode is Mode.HOLD:
        return f"no new lease would be granted; {len(leased)} are kept{_listed(leased)}"
    ends = f" and {len(guests)} guests end" if mode is Mode.OFF else ""
    return f"{len(leased)} leases would be released{_listed(leased)}{ends}"


def _listed(leased: list[ReplicaRow]) -> str:
    shown = ", ".join(f"{each.name} of {each.job or '?'}" for each in leased[:5])
    return f" ({shown}{', …' if len(leased) > 5 else ''})" if leased else ""


def _revoke(args: argparse.Namespace) -> int:
    client = client_of(args)
    if args.dry_run:
        found = {each.name: each for each in fleet_of(client.snapshot()).replicas}
        replica = found.get(args.replica)
        if replica is None or replica.lease is None:
            raise RefusedError(f"{args.replica} has no lease; look at `rose status`")
        say(f"{args.replica}: lease of epoch {replica.lease.epoch} would be revoked")
        return ExitCode.DONE
    epoch = client.revoke(args.replica, args.reason)
    say(f"{args.replica}: lease of epoch {epoch} revoked")
    return ExitCode.DONE


# ---- stop-all ----


def _stop_all(args: argparse.Namespace) -> int:
    client = client_of(args)
    if args.dry_run:
        fleet = fleet_of(client.snapshot())
        say(f"stop-all: {_would(fleet, Mode.OFF)}; {len(fleet.nodes)} nodes would be told")
        return ExitCode.DONE
    began_s = time.monotonic()
    try:
        client.stop(pb.HARVEST_MODE_OFF)
    except UnavailableError:
        if args.store is None:
            raise
        return _stop_in_store(args)
    within_s = args.within or _deadline_s(client)
    grace_s = 0.0 if args.within else PROOF_S
    try:
        proof = _see_gone(client, began_s, within_s, grace_s)
    except UnavailableError as error:
        note(f"the stop was taken, and nobody says what is left of it: {error}")
        return ExitCode.UNPROVED
    took_s = time.monotonic() - began_s
    code = _code(proof)
    data = {**asdict(proof), "took_s": round(took_s, 3), "exit_code": int(code)}
    write(View(data, tuple(proof.lines(took_s))), Format(args.output))
    return code


def _code(proof: Proof) -> ExitCode:
    if proof.left:
        return ExitCode.FOUND
    return ExitCode.DONE if proof.proved else ExitCode.UNPROVED


def _deadline_s(client: PolicyClient) -> float:
    """Return the longest `reclaimDeadline` of all policies, in seconds; the default if they cannot
    be read.
    """
    # Imported here: it takes long, and most commands have nothing to do with policies.
    from elastic_scheduler.capacity import CLI, parse_policy
    from elastic_scheduler.errors import PolicyError

    try:
        policies = [parse_policy(view.policy) for view in client.policies() if view.name != CLI]
    except (RoseError, PolicyError):  # of another release: the stop itself was taken
        return DEADLINE_S
    return max((policy.reclaim_deadline_s for policy in policies), default=DEADLINE_S)


def _see_gone(client: PolicyClient, began_s: float, within_s: float, grace_s: float) -> Proof:
    """Poll the fleet until its guests are proved gone or `within_s` is over, and return the last
    proof.

    It waits `grace_s` longer if only measurements are missing.
    """
    while True:
        proof = proof_of(fleet_of(client.snapshot()))
        waited_s = time.monotonic() - began_s
        if proof.settled(waited_s):
            return proof
        only_measured = not proof.unheard
        # The next look would be too late.
        if waited_s + POLL_S > within_s + (grace_s if only_measured else 0.0):
            return proof
        time.sleep(POLL_S)


def _stop_in_store(args: argparse.Namespace) -> int:
    name = taken_store(args)
    if not name.is_etcd and not Path(name.name).exists():
        raise ConfigError(
            f"store {name.name} does not exist; give the --store of the scheduler"
        ) from None
    asyncio.run(_leave_in_store(name))
    code = ExitCode.UNPROVED
    lines = (
        f"no scheduler answers: {args.store} says stop, and the next one obeys it",
        f"nodes without a scheduler lend nothing after staleAfter ({STALE_AFTER_S:g} s)",
        "no node was asked what is left: nothing is proved",
    )
    write(View({"stored_in": args.store, "exit_code": int(code)}, lines), Format(args.output))
    return code


async def _leave_in_store(name: StoreName) -> None:
    # Imported here: it takes long, and most commands do not need it.
    from elastic_scheduler import HarvestMode
    from rose.scheduler.persistence import save_stop

    store = open_store(name)
    try:
        entry = save_stop(HarvestMode.OFF)
        await store.put(entry.key, entry.value)
    finally:
        await store.close()


# ---- kill, unkill ----


def _kill(args: argparse.Namespace) -> int:
    # Imported here: only this command looks at processes.
    from rose.node.guest.kill_switch import end_guests, guest_groups

    guests = guest_groups(args.folder, args.folder / KILL_FILE)
    # This covers a folder that was removed under its guests: their keepers name it.
    file = args.folder / KILL_FILE if guests else _kill_file(args.folder)
    if args.dry_run:
        named = ", ".join(f"{name} (process {pid})" for name, pid in guests.items())
        say(f"{file} would be set, and {len(guests)} guests end{f': {named}' if named else ''}")
        return ExitCode.DONE
    ended = end_guests(args.folder, file, args.within)
    if ended.barred:
        say(f"{file} is set: no guest starts until `rose unkill {args.folder}` takes it back")
    else:
        say(f"{file} cannot be written and no daemon runs: one that starts may start guests anew")
    for guest in ended.guests:
        say(f"{guest.name} (process {guest.pid}) {guest.outcome}")
    done = ended.barred and all(guest.in_time for guest in ended.guests)
    return ExitCode.DONE if done else ExitCode.FOUND


def _unkill(args: argparse.Namespace) -> int:
    file = _kill_file(args.folder)
    if args.dry_run:
        say(f"{file} would be removed" if file.exists() else f"{file} is not set")
        return ExitCode.DONE
    try:
        file.unlink()
    except FileNotFoundError:
        say(f"{file} was not set")
        return ExitCode.DONE
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be removed ({error.strerror}); check its owner"
        ) from error
    say(f"{file} is gone: guests may start again")
    return ExitCode.DONE


def _kill_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the run folder of a node")
    return folder / KILL_FILE
