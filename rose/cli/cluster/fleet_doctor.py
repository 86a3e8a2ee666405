"""`rose doctor` of a cluster: its faults by its scheduler's word, and how to mend them."""

from collections.abc import Iterator, Sequence
from typing import Final

from rose.cli.machine.doctor import Finding, note, ok, wrong
from rose.command_line.output import ago
from rose.operate.client import PolicyClient
from rose.operate.fleet import Fleet, Mode, NodeState, fleet_of, names
from rose.rpc import rose_pb2 as pb

# Starts of an engine after which they are no accident.
MANY_RESTARTS: Final = 3


def diagnose_fleet(client: PolicyClient) -> Iterator[Finding]:
    """Ask the scheduler, and check its answer. Raises `UnavailableError` if none answers."""
    snapshot = client.snapshot()
    yield from fleet_checks(fleet_of(snapshot), client.policies())


def fleet_checks(fleet: Fleet, policies: Sequence[pb.PolicyView]) -> Iterator[Finding]:
    """Return findings about one snapshot of a cluster, from the scheduler down to its engines."""
    yield from _scheduler(fleet)
    yield from _policies(fleet, policies)
    yield from _nodes(fleet)
    yield from _hosts(fleet)
    yield from _jobs(fleet)
    yield from _engines(fleet)


def _scheduler(fleet: Fleet) -> Iterator[Finding]:
    yield ok("scheduler", f"leads, release {fleet.release or 'before 0.3'}")
    for trouble in fleet.troubles:
        yield wrong("scheduler", trouble, "see its event log")
    if fleet.store_stalled_s:
        yield wrong(
            "store",
            f"a write has waited for {ago(fleet.store_stalled_s)}: nothing new is leased",
            "look at its disk, or at etcd",
        )


def _policies(fleet: Fleet, policies: Sequence[pb.PolicyView]) -> Iterator[Finding]:
    for view in policies:
        if view.halted:
            yield wrong(
                f"policy {view.name}",
                f"its canary is halted: {view.halted}",
                "mend that, then apply the policy again",
            )
    if not policies:
        yield note("policies", "none is in force: nothing is lent", "rose policy apply FILE")
        return
    yield ok("policies", f"{len(policies)} in force")
    if fleet.harvest is Mode.OFF:
        yield note(
            "harvest",
            "nothing is lent: every policy only advises, or an operator has stopped it",
            "rose policy explain says which; rose resume ends a stop",
        )
    elif fleet.harvest is not Mode.ACTIVE:
        yield note("harvest", f"the operator's stop is {fleet.harvest}", "rose resume ends it")


def _nodes(fleet: Fleet) -> Iterator[Finding]:
    by = {state: [n for n in fleet.nodes if n.state is state] for state in NodeState}
    there = by[NodeState.ATTACHED]
    if there:
        yield ok("nodes", f"{len(there)} attached")
    else:
        yield wrong("nodes", "none is attached", "start `rose node` with this --scheduler")
    for state, what in ((NodeState.SILENT, "silent"), (NodeState.AWAY, "not attached")):
        if by[state]:
            yield wrong(
                "nodes",
                f"{len(by[state])} are {what}: {names(by[state])}",
                "on each of them: rose doctor --config FILE",
            )
    if skewed := fleet.skewed:
        yield note(
            "releases",
            f"{len(skewed)} nodes are not of {fleet.release}: {names(skewed)}",
            "upgrade them: releases next to each other work together, no others",
        )


def _hosts(fleet: Fleet) -> Iterator[Finding]:
    hostless = [n for n in fleet.nodes if n.state is NodeState.ATTACHED and not n.hosts]
    if hostless:
        yield note(
            "hosts",
            f"{len(hostless)} nodes have none: {names(hostless)}",
            "start the host with its plugin, where guests shall run beside one",
        )
    missed = [node for node in fleet.nodes if node.strain > 1.0]
    if missed:
        yield wrong(
            "latency",
            f"{len(missed)} hosts miss a target: {names(missed)}",
            "rose top shows which; rose hold stops new leases",
        )


def _jobs(fleet: Fleet) -> Iterator[Finding]:
    if not fleet.jobs:
        yield note("jobs", "none is registered: nobody needs what is lent", "start a trainer")
    for job in fleet.jobs:
        if job.run is not None and job.run.state == "silent":
            yield note(
                f"job {job.name}",
                f"its trainer was heard {ago(job.run.silent_s)} ago",
                f"see {job.run.holder}, or `rose jobs end {job.name}`",
            )


def _engines(fleet: Fleet) -> Iterator[Finding]:
    for replica in fleet.replicas:
        engine = replica.engine
        if engine is None:
            continue
        where = f"on node {replica.node}: rose doctor --config FILE, and the engine's log"
        if engine.state == "failed":
            yield wrong(replica.name, "its engine was given up", where)
        elif engine.restarts >= MANY_RESTARTS:
            yield note(replica.name, f"its engine was started {engine.restarts} times again", where)
