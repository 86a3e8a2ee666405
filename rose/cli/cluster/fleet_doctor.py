"""`rose doctor` of a cluster: the faults in its scheduler's snapshot, and how to mend them."""

from collections.abc import Iterator, Sequence
from typing import Final

from rose.cli.machine.doctor import Diagnosis, note, ok, wrong
from rose.command_line.output import ago
from rose.operate.client import PolicyClient
from rose.operate.fleet import Fleet, Mode, NodeState, fleet_of, names
from rose.rpc import rose_pb2 as pb

# Restarts of an engine from which on they are reported.
MANY_RESTARTS: Final = 3
Named = tuple[str, Diagnosis]


def diagnose_fleet(client: PolicyClient) -> Iterator[Diagnosis]:
    """Yield findings about a cluster, from its scheduler's snapshot.

    Raises `UnavailableError` if no scheduler answers.
    """
    snapshot = client.snapshot()
    yield from fleet_checks(fleet_of(snapshot), client.policies())


def fleet_checks(fleet: Fleet, policies: Sequence[pb.PolicyView]) -> Iterator[Diagnosis]:
    """Yield findings about a snapshot of a cluster: scheduler, policies, nodes, jobs, …"""
    for checks in (
        _scheduler(fleet),
        _policies(fleet, policies),
        _nodes(fleet),
        _hosts(fleet),
        _jobs(fleet),
        _engines(fleet),
    ):
        for subject, finding in checks:
            yield finding.about(subject)


def _scheduler(fleet: Fleet) -> Iterator[Named]:
    yield "scheduler", ok(f"leads, release {fleet.release or 'before 0.3'}")
    for trouble in fleet.troubles:
        yield "scheduler", wrong(trouble, "see its event log")
    if fleet.store_stalled_s:
        what = f"a write has waited for {ago(fleet.store_stalled_s)}: nothing new is leased"
        yield "store", wrong(what, "look at its disk, or at etcd")


def _policies(fleet: Fleet, policies: Sequence[pb.PolicyView]) -> Iterator[Named]:
    for view in policies:
        if view.halted:
            halted = f"its canary is halted: {view.halted}"
            yield f"policy {view.name}", wrong(halted, "mend that, then apply the policy again")
    if not policies:
        yield "policies", note("none is in force: nothing is lent", "rose policy apply FILE")
        return
    yield "policies", ok(f"{len(policies)} in force")
    if fleet.harvest is Mode.OFF:
        yield (
            "harvest",
            note(
                "nothing is lent: every policy only advises, or an operator has stopped it",
                "rose policy explain says which; rose resume ends a stop",
            ),
        )
    elif fleet.harvest is not Mode.ACTIVE:
        yield "harvest", note(f"the operator's stop is {fleet.harvest}", "rose resume ends it")


def _nodes(fleet: Fleet) -> Iterator[Named]:
    by = {state: [n for n in fleet.nodes if n.state is state] for state in NodeState}
    if there := by[NodeState.ATTACHED]:
        yield "nodes", ok(f"{len(there)} attached")
    else:
        yield "nodes", wrong("none is attached", "start `rose node` with this --scheduler")
    for state, what in ((NodeState.SILENT, "silent"), (NodeState.AWAY, "not attached")):
        if by[state]:
            what = f"{len(by[state])} are {what}: {names(by[state])}"
            yield "nodes", wrong(what, "on each of them: rose doctor --config FILE")
    if skewed := fleet.skewed:
        what = f"{len(skewed)} nodes are not of {fleet.release}: {names(skewed)}"
        do = "upgrade them: releases next to each other work together, no others"
        yield "releases", note(what, do)


def _hosts(fleet: Fleet) -> Iterator[Named]:
    hostless = [n for n in fleet.nodes if n.state is NodeState.ATTACHED and not n.hosts]
    if hostless:
        do = "start the host with its plugin, where guests shall run beside one"
        yield "hosts", note(f"{len(hostless)} nodes have none: {names(hostless)}", do)
    missed = [node for node in fleet.nodes if node.strain > 1.0]
    if missed:
        what = f"{len(missed)} hosts miss a target: {names(missed)}"
        yield "latency", wrong(what, "rose top shows which; rose hold stops new leases")


def _jobs(fleet: Fleet) -> Iterator[Named]:
    if not fleet.jobs:
        yield "jobs", note("none is registered: nobody needs what is lent", "start a trainer")
    for job in fleet.jobs:
        if job.run is not None and job.run.state == "silent":
            what = f"its trainer was heard {ago(job.run.silent_s)} ago"
            do = f"see {job.run.holder}, or `rose jobs end {job.name}`"
            yield f"job {job.name}", note(what, do)


def _engines(fleet: Fleet) -> Iterator[Named]:
    for replica in fleet.replicas:
        engine = replica.engine
        if engine is None:
            continue
        do = f"on node {replica.node}: rose doctor --config FILE, and the engine's log"
        if engine.state == "failed":
            yield replica.name, wrong("its engine was given up", do)
        elif engine.restarts >= MANY_RESTARTS:
            yield replica.name, note(f"its engine was started {engine.restarts} times again", do)
