"""Commands that read: status, nodes, replicas, jobs. Each shows a part of one read model."""

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import TypeVar

from rose.cli.cluster.jobs import jobs_table, run_jobs
from rose.cli.cluster.top import add_top_command
from rose.cli.options import Subparsers, add_dry_run, add_scheduler_options, client_of
from rose.cli.tables import headlines, nodes_table, replicas_table
from rose.command_line.output import View, add_output_options, show
from rose.errors import RefusedError
from rose.operate.client import PolicyClient
from rose.operate.fleet import Fleet, Node, Replica, fleet_of


def add_reading_commands(subparsers: Subparsers) -> None:
    """Add them to the command line; `args.run` carries one out."""
    for name, run, what in (
        ("status", _status, "everything right now: nodes, replicas, leases, jobs, and troubles"),
        ("nodes", _nodes, "hosts' latency against its target, and what each node lends"),
        ("replicas", _replicas, "who has each replica, what it does, and why"),
    ):
        verb = subparsers.add_parser(name, help=what)
        if name == "nodes":
            verb.add_argument("names", nargs="*", metavar="NODE", help="only these (default: all)")
        elif name == "replicas":
            verb.add_argument(
                "names", nargs="*", metavar="REPLICA", help="only these (default: all)"
            )
            verb.add_argument("--node", default="", metavar="NODE", help="only those of this one")
            verb.add_argument("--job", default="", metavar="JOB", help="only those that it has")
        add_scheduler_options(verb)
        add_output_options(verb, watch=True)
        verb.set_defaults(run=run)
    add_top_command(subparsers)
    _add_jobs(subparsers)


def _add_jobs(subparsers: Subparsers) -> None:
    jobs = subparsers.add_parser("jobs", help="list, show, end or drop registered jobs")
    verbs = ("list", "show", "end", "drop")
    jobs.add_argument("do", nargs="?", choices=verbs, default="list", help="default list")
    jobs.add_argument("job", nargs="?", default="", metavar="JOB", help="which one")
    jobs.add_argument(
        "--force", action="store_true", help="drop a job though its trainer lives, and fence that"
    )
    add_dry_run(jobs)
    add_scheduler_options(jobs)
    add_output_options(jobs, watch=True)
    jobs.set_defaults(run=lambda args: run_jobs(args, client_of(args)))


def _status(args: argparse.Namespace) -> int:
    return _shown(args, _status_view)


def _nodes(args: argparse.Namespace) -> int:
    return _shown(args, lambda fleet: _nodes_view(fleet, args.names))


def _replicas(args: argparse.Namespace) -> int:
    return _shown(args, lambda fleet: _replicas_view(fleet, args.names, args.node, args.job))


def _shown(args: argparse.Namespace, view: Callable[[Fleet], View]) -> int:
    client: PolicyClient = client_of(args)
    show(args, lambda: view(fleet_of(client.snapshot())))
    return 0


def _status_view(fleet: Fleet) -> View:
    tables = (
        nodes_table(fleet, fleet.nodes),
        replicas_table(fleet.replicas),
        jobs_table(fleet.jobs, "jobs"),
    )
    return View(fleet, headlines(fleet), tables)


def _nodes_view(fleet: Fleet, names: Sequence[str]) -> View:
    nodes = _chosen(fleet.nodes, names, "node")
    lines = () if nodes else ("no node is attached",)
    return View(nodes, lines, (nodes_table(fleet, nodes),))


def _replicas_view(fleet: Fleet, names: Sequence[str], node: str, job: str) -> View:
    if node:
        _chosen(fleet.nodes, [node], "node")
    found = [
        each
        for each in _chosen(fleet.replicas, names, "replica")
        if node in ("", each.node) and job in ("", each.job)
    ]
    lines = () if found else ("there is no such replica" if fleet.replicas else "no replica",)
    return View(found, lines, (replicas_table(found),))


Named = TypeVar("Named", Node, Replica)


def _chosen(found: Sequence[Named], names: Sequence[str], what: str) -> Sequence[Named]:
    """Return the rows of these names, or all. Raises RefusedError for an unknown name."""
    by_name = {each.name: each for each in found}
    for name in names:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"`rose {what}s` lists them"
            raise RefusedError(f"there is no {what} {name!r}; {hint}")
    return [by_name[name] for name in names] if names else found
