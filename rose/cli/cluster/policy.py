"""`rose policy`: capacity policies in force, their changes, and the result for a node."""

import argparse
import fnmatch
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rose.cli.exit_codes import ExitCode
from rose.cli.options import add_dry_run, add_scheduler_options, client_of
from rose.command_line.output import (
    Format,
    Said,
    Table,
    Tone,
    TonedText,
    View,
    add_output_options,
    bytes_of,
    note,
    say,
    share_of,
    show,
    write,
)
from rose.command_line.parser import Parser
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.operate.client import PolicyClient
from rose.operate.fleet import Capacity, Mode, ReplicaRow, capacity_of, fleet_of
from rose.rpc import rose_pb2 as pb

if TYPE_CHECKING:
    # The import takes long, and most commands have nothing to do with policies.
    from elastic_scheduler.capacity import CapacityPolicy

COLUMNS: Final = (
    ("NAME", "name"),
    ("MODE", "mode"),
    ("STOP", "stopPolicy"),
    ("NODES", "nodeSelector"),
    ("COMPUTE", "maxHarvest.compute"),
    ("MEMORY", "maxHarvest.memory"),
    ("MOST NODES", "maxHarvest.nodes"),
    ("SLACK", "slackShare"),
    ("OBJECTIVE", "sloBudget.objective"),
    ("CANARY", "canary.percent"),
)
# Shortest time over which averages are shown in place of the present figures.
LEAST_ADVISED_S: Final = 60.0


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose policy` and its verbs."""
    policy = Parser(prog)
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
        _add_arguments(verb, name)
        add_scheduler_options(verb)
    return policy


def _add_arguments(verb: argparse.ArgumentParser, name: str) -> None:
    match name:
        case "apply" | "diff":
            verb.add_argument(
                "file", type=Path, metavar="FILE", help="JSON or YAML: a policy, or a list"
            )
        case "set" | "delete":
            verb.add_argument("name", metavar="NAME")
        case "get":
            verb.add_argument("name", nargs="?", default="", metavar="NAME", help="default: all")
        case _:
            verb.add_argument("node", nargs="?", default="", metavar="NODE", help="default: all")
    if name == "set":
        verb.add_argument("changes", nargs="+", metavar="FIELD=VALUE")
        verb.add_argument("--create", action="store_true", help="make the policy if there is none")
    if name in ("apply", "set"):
        verb.add_argument(
            "--allow-no-nodes",
            action="store_true",
            help="apply a policy also where its selector matches no attached node",
        )
    if name in ("apply", "set", "delete"):
        add_dry_run(verb)
    else:
        add_output_options(verb, watch=name == "explain")


# ---- get ----


def _get(args: argparse.Namespace) -> int:
    client = client_of(args)
    views = client.policies()
    if args.name:
        views = [_named(views, args.name)]
    said = [json.loads(view.policy) for view in views]
    data = said[0] if args.name else said
    lines = () if views else ("no policy is in force: nothing is lent",)
    fields = Table(("FIELD", "VALUE"), tuple(_paths(said[0]).items())) if args.name else None
    table = fields or _policies_table(said, views)
    write(View(data, lines, (table,)), Format(args.output))
    if any(each.get("nodeSelector") for each in said):
        # The import takes long, and is not needed for policies for all nodes.
        from elastic_scheduler.capacity import policy_of

        nodes = client.explain("")
        for policy in map(policy_of, said):
            selected = [each.node for each in nodes if policy.name in each.policies]
            _note_selector(policy, selected, len(nodes))
    for view in views:
        if view.halted:
            note(f"policy {view.name}: canary halted: {view.halted}")
    return ExitCode.DONE


def _policies_table(said: list[dict[str, Any]], views: list[pb.PolicyView]) -> Table:
    rows: list[tuple[Said, ...]] = []
    for policy, view in zip(said, views, strict=True):
        flat = _paths(policy)
        selector = policy.get("nodeSelector")
        flat["nodeSelector"] = _selected(selector) if selector else "all"
        mode = TonedText("halted", Tone.BAD) if view.halted else flat.get("mode", "-")
        rest = (flat.get(path, "-") for _, path in COLUMNS[2:])
        rows.append((flat["name"], mode, *rest))
    return Table(tuple(title for title, _ in COLUMNS), tuple(rows))


def _selected(selector: dict[str, Any]) -> str:
    labels = [f"{key}={value}" for key, value in selector.get("matchLabels", {}).items()]
    rules = selector.get("matchExpressions", [])
    labels += [
        " ".join((r["key"], r["operator"], "|".join(r.get("values", [])))).strip() for r in rules
    ]
    return ",".join([*labels, *selector.get("names", [])]) or "all"


# ---- apply, diff, set, delete ----


@dataclass(frozen=True, slots=True)
class FieldChange:
    """Change that applying a policy would make to one field.

    what: set instead of a field for a new policy, or a halt that would end.
    """

    policy: str
    field: str = ""
    before: str = ""
    after: str = ""
    what: str = ""

    def __str__(self) -> str:
        if self.what:
            return f"policy {self.policy}: {self.what}"
        return f"policy {self.policy}: {self.field}: {self.before} -> {self.after}"


def _apply(args: argparse.Namespace) -> int:
    client = client_of(args)
    policies = _read(args.file)
    # All are checked before the first is in force.
    outlooks = [_outlook(client, policy, args) for policy in policies]
    for at, (policy, outlook) in enumerate(zip(policies, outlooks, strict=True)):
        if outlook.changed and not args.dry_run:
            _apply_one(client, policy, [each.name for each in policies[at:]])
        what = ("would change" if args.dry_run else "applied") if outlook.changed else "unchanged"
        say(f"policy {policy.name}: {what}; {_effect(outlook)}")
        if "mode" not in policy.model_fields_set:
            note(
                f"policy {policy.name} has no mode: it only bounds what other policies allow;"
                " write mode: Active to lend"
            )
    if not args.dry_run:
        for policy, outlook in zip(policies, outlooks, strict=True):
            _note_selector(policy, outlook.nodes, outlook.attached)
    return ExitCode.DONE


def _outlook(
    client: PolicyClient, policy: "CapacityPolicy", args: argparse.Namespace
) -> pb.ApplyPolicyReply:
    """Return what a policy would change. Raises RefusedError if its selector matches none of the
    attached nodes, unless that is allowed.
    """
    outlook = client.outlook(policy)
    if outlook.attached and not outlook.nodes and not args.allow_no_nodes:
        raise RefusedError(
            f"policy {policy.name}: {policy.node_selector.no_nodes()}; mend it, or write"
            " --allow-no-nodes where they are still to come"
        )
    return outlook


def _effect(outlook: pb.ApplyPolicyReply) -> str:
    ends = f"; ends {_counted('lease', outlook.ends)}" if outlook.ends else ""
    return f"selects {_counted('node', outlook.nodes)}{ends}"


def _counted(what: str, names: Sequence[str]) -> str:
    shown = f" ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})" if names else ""
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}{shown}"


def _note_selector(policy: "CapacityPolicy", selected: Collection[str], attached: int) -> None:
    """Print a note to standard error for a policy that does not count now, selects none of the
    `attached` nodes, or names a missing one.
    """
    selector, lacking = policy.node_selector, ""
    absent = [name for name in selector.names if not fnmatch.filter(selected, name)]
    if not policy.counts_at(time.time()):
        lacking = "it does not count now, by its from, until or during"
    elif attached and not selected:
        lacking = selector.no_nodes()
    elif absent and attached:
        lacking = f"no node {absent[0]!r} is attached ({len(absent)} such)"
    elif not attached and selector != type(selector)():
        lacking = "no node is attached"
    if lacking:
        note(f"policy {policy.name}: {lacking}")


def _apply_one(client: PolicyClient, policy: "CapacityPolicy", rest: Sequence[str]) -> None:
    try:
        client.apply(policy)
    except UnavailableError as error:
        # All were accepted, so the scheduler went away in between.
        raise UnavailableError(
            f"{error}; not known to be in force: {', '.join(rest)}: apply the file again, which"
            " changes nothing twice"
        ) from error


def _diff(args: argparse.Namespace) -> int:
    client = client_of(args)
    force = {view.name: view for view in client.policies()}
    policies = _read(args.file)
    found = [
        difference
        for policy in policies
        for difference in _differences(force.get(policy.name), policy)
    ]
    write(View(found, tuple(map(str, found))), Format(args.output))
    for policy in policies:
        note(f"policy {policy.name}: {_effect(client.outlook(policy))}")
    return ExitCode.FOUND if found else ExitCode.DONE


def _set(args: argparse.Namespace) -> int:
    from elastic_scheduler.capacity import policy_of
    from elastic_scheduler.errors import PolicyError

    client = client_of(args)
    views = client.policies()
    if args.create and all(view.name != args.name for view in views):
        views = [*views, pb.PolicyView(name=args.name, policy=json.dumps({"name": args.name}))]
    view = _named(views, args.name, "; `rose policy set --create` makes one")
    said = json.loads(view.policy)
    for change in args.changes:
        path, equals, text = change.partition("=")
        if not (path and equals) or path == "name":
            raise ConfigError(f"{change!r} changes nothing; write FIELD=VALUE, as slackShare=0.2")
        _put(said, path.split("."), _value(text))
    try:
        policy = policy_of(said)
    except PolicyError as error:
        raise ConfigError(str(error)) from None
    outlook = _outlook(client, policy, args)
    effect = _effect(outlook)
    if args.dry_run:
        differences = [*map(str, _differences(view, policy))] or [f"policy {args.name}: unchanged"]
        say(*differences, f"policy {args.name}: {effect}")
        return ExitCode.DONE
    changed = client.apply(policy)
    say(f"policy {args.name}: {'applied' if changed else 'unchanged'}; {effect}")
    _note_selector(policy, outlook.nodes, outlook.attached)
    return ExitCode.DONE


def _delete(args: argparse.Namespace) -> int:
    client = client_of(args)
    if args.dry_run:
        _named(client.policies(), args.name)
        held = [row.node for row in client.explain("") if args.name in row.policies]
        say(f"policy {args.name}: would be deleted; it holds for {_counted('node', held)}")
        return ExitCode.DONE
    client.delete(args.name)
    say(f"policy {args.name}: deleted")
    return ExitCode.DONE


def _named(views: list[pb.PolicyView], name: str, hint: str = "") -> pb.PolicyView:
    for view in views:
        if view.name == name:
            return view
    known = ", ".join(view.name for view in views) or "none"
    raise RefusedError(f"there is no policy {name!r}; in force: {known}{hint}")


def _read(file: Path) -> "tuple[CapacityPolicy, ...]":
    from elastic_scheduler.capacity import policies_of
    from elastic_scheduler.errors import PolicyError
    from rose.core_yaml import documents, line_of

    policies: list[CapacityPolicy] = []
    try:
        for said, node in documents(file):
            try:
                policies += policies_of(said)
            except PolicyError as error:
                raise ConfigError(f"{file}:{line_of(node, error.path)}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); check the path") from None
    except ValueError as error:
        line = str(error).splitlines()[0]
        raise ConfigError(f"{file} is no YAML ({line}); write one policy, or a list") from None
    if not policies:
        raise ConfigError(f"{file} has no policy; write one, or a list")
    return tuple(policies)


def _paths(value: dict[str, Any]) -> dict[str, str]:
    """Return every field of a policy by its dotted path, with values as text, or as JSON."""
    return {
        path: text if isinstance(text, str) else json.dumps(text) for path, text in _leaves(value)
    }


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - JSON
    if not isinstance(value, dict):
        yield path, value
        return
    for key, each in value.items():
        yield from _leaves(each, f"{path}.{key}" if path else key)


def _differences(view: pb.PolicyView | None, wanted: "CapacityPolicy") -> list[FieldChange]:
    """Return the changes that applying `wanted` would make to the policy in force, defaults
    included.

    view: None for a new policy.
    """
    from elastic_scheduler.capacity import parse_policy

    if view is None:
        return [FieldChange(wanted.name, what="new")]
    now, then = (
        {path: json.dumps(value) for path, value in _leaves(dumped)}
        for dumped in (
            each.model_dump(mode="json", by_alias=True)
            for each in (parse_policy(view.policy), wanted)
        )
    )
    found = [
        FieldChange(wanted.name, path, now.get(path, "–"), then.get(path, "–"))
        for path in sorted(now.keys() | then.keys())
        if now.get(path) != then.get(path)
    ]
    if view.halted:
        what = f"applying it ends the halt of its canary: {view.halted}"
        found.append(FieldChange(wanted.name, what=what))
    return found


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


# ---- explain ----


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """Policy in force for a node, and the node's guests."""

    node: str
    capacity: Capacity
    guests: tuple[ReplicaRow, ...]


def _explain(args: argparse.Namespace) -> int:
    client = client_of(args)

    def read() -> View:
        rows = client.explain(args.node)
        replicas = fleet_of(client.snapshot()).by_node() if rows else {}
        found = [_policy_of(row, replicas.get(row.node, ())) for row in rows]
        lines = tuple(line for each in found for line in explained(each))
        return View(found, lines or ("no node is attached",))

    show(args, read)
    return ExitCode.DONE


def _policy_of(row: pb.NodeCapacity, replicas: Sequence[ReplicaRow]) -> NodePolicy:
    return NodePolicy(row.node, capacity_of(row), tuple(r for r in replicas if r.is_guest))


def explained(found: NodePolicy, now: Callable[[], datetime] = datetime.now) -> Iterator[str]:
    """Yield lines about one node: the result, the load, the figures, its guests, and the policy
    that set each field.
    """
    capacity = found.capacity
    held = f"; held back by {'; '.join(capacity.limits)}" if capacity.limits else ""
    yield f"{found.node}: {_harvest(capacity, now())}{held}"
    if capacity.busy_share is None and capacity.kv_share is None:
        yield "  lends nothing: no host of it was heard; `rose doctor --config FILE` there says why"
    else:
        advice = (
            f"; an Active policy would: {WORDS[capacity.would]}"
            if capacity.would is not capacity.mode
            else ""
        )
        yield f"  {WORDS[capacity.mode]}{advice}{_load(capacity)}"
    yield from _in_figures(capacity)
    for guest in found.guests:
        if guest.engine is not None:
            yield (
                f"  {guest.name}: {guest.engine.grant}, duty {guest.engine.duty:.0%}:"
                f" {guest.engine.why or guest.engine.state}"
            )
    for field in capacity.fields:
        yield f"  {field.path}: {field.value} ({field.policy})"


WORDS: Final = {
    Mode.ACTIVE: "lends",
    Mode.HOLD: "lends nothing new",
    Mode.DRAIN: "gives back what it lends",
    Mode.OFF: "lends nothing",
    Mode.UNKNOWN: "unknown",
}


def _harvest(capacity: Capacity, now: datetime) -> str:
    """Return `would harvest 38.0 GiB, 61% of compute since 09:12`: the average over that time, or
    the present figures.
    """
    lends = capacity.mode is capacity.would is Mode.ACTIVE
    verb = "may harvest" if lends else "would harvest"
    if capacity.lend_bytes is None and capacity.lend_compute is None:
        return f"{verb} what its node has not said yet"
    averaged = capacity.advised_s >= LEAST_ADVISED_S
    memory = capacity.advised_bytes if averaged else capacity.lend_bytes
    compute = capacity.advised_compute if averaged else capacity.lend_compute
    figures = [
        *([] if capacity.lend_bytes is None else [bytes_of(memory)]),
        *([] if capacity.lend_compute is None else [f"{share_of(compute)} of compute"]),
    ]
    when = f"since {_since(capacity.advised_s, now)}" if averaged else "now"
    return f"{verb} {', '.join(figures)} {when}"


def _since(over_s: float, now: datetime) -> str:
    """Return the local time of day `over_s` seconds ago, with the date if that was not today."""
    began = datetime.fromtimestamp(now.timestamp() - over_s)
    return f"{began:%H:%M}" if began.date() == now.date() else f"{began:%b %d, %H:%M}"


def _load(capacity: Capacity) -> str:
    busy, full = capacity.busy_share, capacity.kv_share
    said = "" if busy is None else f"; its host works {busy:.0%} of the time"
    return said if full is None else f"{said}; its host's KV cache is {full:.0%} full"


def _in_figures(capacity: Capacity) -> Iterator[str]:
    """Yield one line with the bytes and the share of compute that the node lends, or would lend,
    now; none if both are unknown.
    """
    verb = "lends up to" if capacity.mode is capacity.would else "would lend"
    figures = []
    if capacity.lend_bytes is not None:
        figures.append(f"{bytes_of(capacity.lend_bytes)} of KV memory")
    if capacity.lend_compute is not None:
        figures.append(f"{share_of(capacity.lend_compute)} of compute")
    if figures:
        yield f"  {verb} {' and '.join(figures)} now"
