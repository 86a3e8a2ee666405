"""Capacity policies and the operator's stop: `rose policy`, hold, drain, resume, stop-all.

`rose stop-all` returns when every guest that the scheduler knows is gone, as its node measured, or
says which is not, and of which nothing is known; without a scheduler it leaves the stop in the
store, where the next one finds it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from rose.cli.commands import SchedulerClient, add_scheduler_options
from rose.errors import ConfigError, RefusedError, RoseError, UnavailableError
from rose.rpc import rose_pb2 as pb
from rose.security.certificates import taken_certificates
from rose.store.opening import StoreName, add_store_options, open_store, taken_store

if TYPE_CHECKING:
    # What checks policies takes long to import, for commands that have nothing to do with them.
    from elastic_scheduler.capacity import CapacityPolicy

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_DIFFERENT: Final = 1
# Of `stop-all`: something is there still; nobody measured that nothing is.
EXIT_LEFT: Final = 1
EXIT_UNPROVED: Final = 3
# The longest `staleAfter` that a policy may say: a node without a scheduler lends nothing then.
STALE_AFTER_S: Final = 5.0
WITHIN_S: Final = 10.0
POLL_S: Final = 0.1
_GIB: Final = 1 << 30
# A node of 0.2.0 never measures.
MEASURED_S: Final = 2.0
STOPS: Final = {
    "hold": (pb.HARVEST_MODE_HOLD, "grant no new leases; those that live are kept"),
    "drain": (pb.HARVEST_MODE_HOLD_AND_DRAIN, "grant no new leases and take back those that live"),
    "resume": (
        pb.HARVEST_MODE_ACTIVE,
        "end a hold, a drain or a stop: policies alone decide again",
    ),
}


class PolicyClient(SchedulerClient):
    """Calls of a scheduler about policies. Raises as `SchedulerClient` does."""

    def _meaning(self, code: grpc.StatusCode, details: str | None) -> RoseError:
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return RefusedError(
                f"the scheduler at {self._address} is of an older release and knows no policies;"
                " upgrade it, or use `rose harvest`"
            )
        return super()._meaning(code, details)

    def policies(self) -> list[pb.PolicyView]:
        """All policies in force."""
        ask = pb.ListPoliciesRequest()
        return list(self._call(lambda s: s.ListPolicies(ask, timeout=self._timeout_s)).policies)

    def apply(self, policy: "CapacityPolicy", *, dry_run: bool = False) -> bool:
        """Put a policy in force, or only have it checked; whether that changes anything."""
        ask = pb.ApplyPolicyRequest(policy=policy.to_json(), dry_run=dry_run)
        return self._call(lambda s: s.ApplyPolicy(ask, timeout=self._timeout_s)).changed

    def delete(self, name: str) -> None:
        """Take a policy out of force."""
        ask = pb.DeletePolicyRequest(name=name)
        self._call(lambda s: s.DeletePolicy(ask, timeout=self._timeout_s))

    def explain(self, node: str) -> list[pb.NodeCapacity]:
        """Which policy decided what, of one node, or of all ("")."""
        ask = pb.ExplainPolicyRequest(node=node)
        return list(self._call(lambda s: s.ExplainPolicy(ask, timeout=self._timeout_s)).nodes)

    def stop(self, mode: "pb.HarvestMode.ValueType", replica: str = "") -> int:
        """Set the operator's stop, and no policy; returns the leases it released."""
        ask = pb.SetHarvestRequest(mode=mode, replica=replica, stop_alone=True)
        return self._call(lambda s: s.SetHarvest(ask, timeout=self._timeout_s)).released


def add_policy_commands(subparsers: "Subparsers") -> None:
    """Add them to the command line; `args.run` is what carries one out."""
    policy = subparsers.add_parser("policy", help="say what may be lent, where and when")
    verbs = policy.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, run, what in (
        ("get", _get, "print policies in force"),
        ("apply", _apply, "put the policies of a file in force"),
        ("diff", _diff, "say what a file would change; exit code 1 when it would"),
        ("set", _set, "change fields of a policy in force, as slackShare=0.2"),
        ("delete", _delete, "take a policy out of force"),
        ("explain", _explain, "say what holds for a node, and which policy decided it"),
    ):
        verb = verbs.add_parser(name, help=what)
        verb.set_defaults(run=run)
        add_scheduler_options(verb)
        if name in ("apply", "diff"):
            verb.add_argument("file", type=Path, metavar="FILE", help="JSON: a policy, or a list")
        elif name in ("set", "delete"):
            verb.add_argument("name", metavar="NAME")
        elif name == "get":
            verb.add_argument("name", nargs="?", default="", metavar="NAME", help="default: all")
        else:
            verb.add_argument("node", nargs="?", default="", metavar="NODE", help="default: all")
        if name == "apply":
            verb.add_argument("--dry-run", action="store_true", help="check it, change nothing")
        if name == "set":
            verb.add_argument("changes", nargs="+", metavar="FIELD=VALUE")
    _add_stops(subparsers)


def _add_stops(subparsers: "Subparsers") -> None:
    for name, (_, what) in STOPS.items():
        stop = subparsers.add_parser(name, help=what)
        stop.add_argument("--replica", default="", metavar="R", help="only this one (default: all)")
        add_scheduler_options(stop)
        stop.set_defaults(run=_stop, stop=name)
    stop_all = subparsers.add_parser(
        "stop-all", help="end all lending and all guests, and see them gone; `rose resume` ends it"
    )
    add_scheduler_options(stop_all)
    stop_all.add_argument(
        "--within", type=float, default=WITHIN_S, metavar="S", help=f"default {WITHIN_S:g}"
    )
    add_store_options(stop_all, "of the scheduler, for when none answers: ")
    stop_all.set_defaults(run=_stop_all)


def _client(args: argparse.Namespace) -> PolicyClient:
    return PolicyClient(args.scheduler, certificates=taken_certificates(vars(args)))


# ---- policies ----


def _get(args: argparse.Namespace) -> int:
    views = _client(args).policies()
    if args.name:
        views = [_named(views, args.name)]
    said = [json.loads(view.policy) for view in views]
    _print(json.dumps(said[0] if args.name else said, indent=2))
    for view in views:
        if view.halted:
            sys.stderr.write(f"{view.name}: canary halted: {view.halted}\n")
    return 0


def _apply(args: argparse.Namespace) -> int:
    client = _client(args)
    policies = _read(args.file)
    # All are checked before the first is in force.
    changes = [client.apply(policy, dry_run=True) for policy in policies]
    for policy, changed in zip(policies, changes, strict=True):
        if changed and not args.dry_run:
            client.apply(policy)
        what = ("would change" if args.dry_run else "applied") if changed else "unchanged"
        _print(f"policy {policy.name}: {what}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from elastic_scheduler.capacity import parse_policy

    force = {view.name: view for view in _client(args).policies()}
    different = False
    for policy in _read(args.file):
        view = force.get(policy.name)
        now = {} if view is None else _flat(parse_policy(view.policy))
        for line in _differences(policy.name, now, _flat(policy)):
            different = True
            _print(line)
        if view is not None and view.halted:
            different = True
            _print(f"policy {policy.name}: applying it ends the halt of its canary: {view.halted}")
    return EXIT_DIFFERENT if different else 0


def _set(args: argparse.Namespace) -> int:
    from elastic_scheduler.capacity import policy_of
    from elastic_scheduler.errors import PolicyError

    client = _client(args)
    said = json.loads(_named(client.policies(), args.name).policy)
    for change in args.changes:
        path, equals, text = change.partition("=")
        if not (path and equals) or path == "name":
            raise ConfigError(f"{change!r} changes nothing; write FIELD=VALUE, as slackShare=0.2")
        _put(said, path.split("."), _value(text))
    try:
        policy = policy_of(said)
    except PolicyError as error:
        raise ConfigError(str(error)) from None
    changed = client.apply(policy)
    _print(f"policy {args.name}: {'applied' if changed else 'unchanged'}")
    return 0


def _delete(args: argparse.Namespace) -> int:
    _client(args).delete(args.name)
    _print(f"policy {args.name}: deleted")
    return 0


def _explain(args: argparse.Namespace) -> int:
    nodes = _client(args).explain(args.node)
    for row in nodes:
        for line in explained(row):
            _print(line)
    if not nodes:
        _print("no node is attached")
    return 0


def explained(row: pb.NodeCapacity) -> Iterator[str]:
    """Lines about one node: what holds, why not more, and whose each field is."""
    mode, would = _mode(row.mode), _mode(row.would)
    advice = f"; an Active policy would: {would}" if would != mode else ""
    busy = (
        f"; its host works {row.busy_share:.0%} of the time" if row.HasField("busy_share") else ""
    )
    yield f"{row.node}: {mode}{advice}{busy}"
    yield from _in_figures(row)
    for limit in row.limits:
        yield f"  held back by {limit}"
    for field in row.fields:
        yield f"  {field.path}: {field.value} ({field.policy})"


def _in_figures(row: pb.NodeCapacity) -> Iterator[str]:
    """What it lends, or would, in bytes and share of compute: now, and on the average."""
    verb = "lends up to" if row.mode == row.would else "would lend"
    figures = []
    if row.HasField("lend_bytes"):
        figures.append(f"{row.lend_bytes / _GIB:.1f} GiB of KV memory")
    if row.HasField("lend_compute"):
        figures.append(f"{row.lend_compute:.0%} of compute")
    if not figures:
        return
    yield f"  {verb} {' and '.join(figures)} now"
    if row.advised_s > 0:
        memory = row.advised_byte_s / row.advised_s / _GIB
        compute = row.advised_compute_s / row.advised_s
        yield (
            f"  on the average of {row.advised_s / 60:.0f} min: {memory:.1f} GiB and {compute:.0%}"
        )


def _mode(mode: "pb.HarvestMode.ValueType") -> str:
    return {
        pb.HARVEST_MODE_ACTIVE: "lends",
        pb.HARVEST_MODE_HOLD: "lends nothing new",
        pb.HARVEST_MODE_HOLD_AND_DRAIN: "gives back what it lends",
        pb.HARVEST_MODE_OFF: "lends nothing",
    }.get(mode, "unknown")


def _named(views: list[pb.PolicyView], name: str) -> pb.PolicyView:
    for view in views:
        if view.name == name:
            return view
    known = ", ".join(view.name for view in views) or "none"
    raise RefusedError(f"there is no policy {name!r}; in force: {known}")


def _read(file: Path) -> "tuple[CapacityPolicy, ...]":
    from elastic_scheduler.capacity import read_policies
    from elastic_scheduler.errors import PolicyError

    try:
        return read_policies(file)
    except PolicyError as error:
        raise ConfigError(str(error)) from None


def _flat(policy: "CapacityPolicy") -> dict[str, str]:
    """Every field by its path, defaults included."""
    found: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:  # noqa: ANN401 - JSON
        if isinstance(value, dict):
            for key, each in value.items():
                walk(each, f"{path}.{key}" if path else key)
        else:
            found[path] = json.dumps(value)

    walk(policy.model_dump(mode="json", by_alias=True), "")
    return found


def _differences(name: str, now: dict[str, str], wanted: dict[str, str]) -> Iterator[str]:
    if not now:
        yield f"policy {name}: new"
        return
    for path in sorted(now.keys() | wanted.keys()):
        before, after = now.get(path, "–"), wanted.get(path, "–")
        if before != after:
            yield f"policy {name}: {path}: {before} -> {after}"


def _put(said: dict[str, Any], path: list[str], value: object) -> None:
    for key in path[:-1]:
        inner = said.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path)} has no fields of its own at {key}; set it whole")
        said = inner
    said[path[-1]] = value


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- the operator's stop ----


def _stop(args: argparse.Namespace) -> int:
    mode, _ = STOPS[args.stop]
    released = _client(args).stop(mode, args.replica)
    whom = args.replica or "all replicas"
    _print(f"{args.stop} of {whom}; {released} leases are being released")
    return 0


def _stop_all(args: argparse.Namespace) -> int:
    client = _client(args)
    began_s = time.monotonic()
    try:
        client.stop(pb.HARVEST_MODE_OFF)
    except UnavailableError:
        if args.store is None:
            raise
        name = taken_store(args)
        if not name.is_etcd and not Path(name.name).exists():
            raise ConfigError(
                f"store {name.name} does not exist; give the --store of the scheduler"
            ) from None
        asyncio.run(_leave_in_store(name))
        _print(f"no scheduler answers: {args.store} says stop, and the next one obeys it")
        _print(f"nodes without a scheduler lend nothing after staleAfter ({STALE_AFTER_S:g} s)")
        _print("no node was asked what is left: nothing is proved")
        return EXIT_UNPROVED
    return _see_gone(client, began_s, began_s + args.within)


async def _leave_in_store(name: StoreName) -> None:
    # Imported here: they take long to import, for commands that have nothing to do with them.
    from elastic_scheduler import HarvestMode
    from rose.scheduler.persistence import save_mode, save_stop

    store = open_store(name)
    try:
        for write in (save_stop(HarvestMode.OFF), save_mode(HarvestMode.OFF, None)):
            assert write.value is not None
            await store.put(write.key, write.value)
    finally:
        await store.close()


def _see_gone(client: PolicyClient, began_s: float, deadline_s: float) -> int:
    """Until no guest holds anything, as measured; what is left at the deadline is said.

    Also until each known node is attached, or was away for so long that it surely lends nothing.
    """
    while True:
        snapshot = client.snapshot()
        guests = guests_of(snapshot)
        left = [line for guest in guests if (line := still_there(guest))]
        unmeasured = unmeasured_of(snapshot)
        now_s = time.monotonic()
        measured = not unmeasured or now_s > began_s + MEASURED_S
        settled = all(node.away_s > STALE_AFTER_S for node in snapshot.away)
        if (measured and settled and not left) or now_s > deadline_s:
            break
        time.sleep(POLL_S)
    for line in (*left, *map(_unproved, snapshot.away)):
        _print(line)
    if unmeasured:
        _print(f"unproved: {', '.join(unmeasured)}: nobody measured what is left; ask its node")
    took_s = time.monotonic() - began_s
    away = f"; {len(snapshot.away)} known nodes are not attached" if snapshot.away else ""
    _print(
        f"stopped {len(guests) - len(left)}/{len(guests)} guests in {took_s:.1f} s: 0 bytes held,"
        f" duty 0%{away}"
    )
    if left:
        return EXIT_LEFT
    return EXIT_UNPROVED if unmeasured or snapshot.away else 0


def _unproved(node: pb.AwayNode) -> str:
    """What is known of a node that nobody can ask."""
    lends = (
        "it holds no lease any more, and lends nothing"
        if node.away_s > STALE_AFTER_S
        else f"it lends nothing from staleAfter ({STALE_AFTER_S:g} s) on"
    )
    return (
        f"unproved: node {node.node} is not attached, last heard {node.away_s:.0f} s ago: {lends};"
        " `rose kill RUN_DIR` there measures its guest"
    )


def unmeasured_of(snapshot: pb.SnapshotReply) -> list[str]:
    """Guests of attached nodes of which nobody said what they hold, by name."""
    measured = {guest.replica for guest in snapshot.guests if guest.HasField("held_bytes")}
    told = {guest.replica for guest in guests_of(snapshot)}
    offered = {each.id for each in snapshot.replicas if each.kind == pb.REPLICA_KIND_GUEST}
    return sorted((told | offered) - measured)


def guests_of(snapshot: pb.SnapshotReply) -> list[pb.GuestTelemetry]:
    """Guests alone: dedicated replicas belong to the jobs, and a stop leaves them."""
    kinds = {replica.id: replica.kind for replica in snapshot.replicas}
    return [g for g in snapshot.guests if kinds.get(g.replica) != pb.REPLICA_KIND_DEDICATED]


def still_there(guest: pb.GuestTelemetry) -> str:
    """What is left of a guest, in words; empty for nothing."""
    if guest.held_bytes or guest.duty > 0 or guest.state in ("healthy", "starting"):
        held = f"{guest.held_bytes / (1 << 20):.1f} MiB"
        return f"{guest.replica}: {guest.state}, holds {held}, duty {guest.duty:.0%}"
    return ""


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
