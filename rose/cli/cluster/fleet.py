"""Commands that read: status, nodes, replicas. Each shows a part of one read model."""

import argparse
import difflib
from collections.abc import Sequence
from typing import TypeVar

from rose.cli.cluster.jobs import jobs_table
from rose.cli.options import add_scheduler_options, client_of
from rose.cli.tables import headlines, nodes_table, replicas_table
from rose.command_line.output import View, add_output_options, show
from rose.command_line.parser import Parser
from rose.errors import RefusedError
from rose.operate.fleet import Fleet, NodeStatus, ReplicaRow, fleet_of


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose status`, `rose nodes` or `rose replicas`, by the
    program's name.
    """
    made = Parser(prog)
    views = {"status": _status, "nodes": _nodes, "replicas": _replicas}
    made.set_defaults(run=_run, view=views[prog.split()[1]])
    if prog == "rose nodes":
        made.add_argument("names", nargs="*", metavar="NODE", help="only these (default: all)")
    elif prog == "rose replicas":
        made.add_argument("names", nargs="*", metavar="REPLICA", help="only these (default: all)")
        made.add_argument("--node", default="", metavar="NODE", help="only those of this one")
        made.add_argument("--job", default="", metavar="JOB", help="only those that it has")
    add_scheduler_options(made)
    add_output_options(made, watch=True)
    return made


def _run(args: argparse.Namespace) -> int:
    client = client_of(args)
    show(args, lambda: args.view(fleet_of(client.snapshot()), args))
    return 0


def _status(fleet: Fleet, _: argparse.Namespace) -> View:
    tables = (
        nodes_table(fleet, fleet.nodes),
        replicas_table(fleet.replicas),
        jobs_table(fleet.jobs, "jobs"),
    )
    return View(fleet, headlines(fleet), tables)


def _nodes(fleet: Fleet, args: argparse.Namespace) -> View:
    nodes = _chosen(fleet.nodes, args.names, "node")
    lines = () if nodes else ("no node is attached",)
    return View(nodes, lines, (nodes_table(fleet, nodes),))


def _replicas(fleet: Fleet, args: argparse.Namespace) -> View:
    if args.node:
        _chosen(fleet.nodes, [args.node], "node")
    found = [
        each
        for each in _chosen(fleet.replicas, args.names, "replica")
        if args.node in ("", each.node) and args.job in ("", each.job)
    ]
    lines = () if found else ("there is no such replica" if fleet.replicas else "no replica",)
    return View(found, lines, (replicas_table(found),))


Named = TypeVar("Named", NodeStatus, ReplicaRow)


def _chosen(found: Sequence[Named], names: Sequence[str], what: str) -> Sequence[Named]:
    """Return the rows of these names, or all rows without names.

    Raises RefusedError for an unknown name.
    """
    by_name = {each.name: each for each in found}
    for name in names:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"`rose {what}s` lists them"
            raise RefusedError(f"there is no {what} {name!r}; {hint}")
    return [by_name[name] for name in names] if names else found
