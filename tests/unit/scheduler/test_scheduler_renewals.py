"""Leases of a node that takes them so are renewed together; of others each by itself."""

from pathlib import Path

import pytest

from rose.errors import RefusedError
from rose.logs.eventlog import EventLog
from rose.node.scheduler_session import NodeIdentity, SchedulerSession, _apart
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.messages import Attached, Command, Offered
from rose.scheduler.service import CommandQueue, SchedulerService
from tests.fakes.memory_store import InMemoryStore
from tests.unit.scheduler.core_cases import CoreBench, offer

GUESTS = ("g0", "g1", "g2", "g3")


def leased(*, takes_renewals: bool) -> CoreBench:
    """Four replicas of one node, granted a little apart from each other."""
    bench = CoreBench().with_job()
    bench.step(Attached("n0", 1, takes_renewals=takes_renewals))
    for count in range(1, len(GUESTS) + 1):
        bench.now_s += 0.1
        bench.offered(*map(offer, GUESTS[:count]))
    return bench


def told(bench: CoreBench, seconds: float) -> list[list[str]]:
    """Replicas of each command with renewals, in turn."""
    commands = []
    until_s = bench.now_s + seconds
    while bench.now_s < until_s:
        bench.at(bench.now_s + 0.1)
        commands += bench.commands()
        bench.offered(*map(offer, GUESTS))
        commands += bench.commands()
    return [
        [lease.replica for lease in command.renewals.leases] or [command.lease.replica]
        for command in commands
        if command.HasField("renewals") or command.HasField("lease")
    ]


def test_all_leases_of_a_node_are_renewed_in_one_command() -> None:
    bench = leased(takes_renewals=True)
    first, *others = told(bench, 5.0)
    assert set(first) == set(GUESTS), "also those that are due a little later"
    assert 3 <= len(others) <= 5
    assert all(set(names) == set(GUESTS) for names in others)
    assert len(bench.core.status(bench.now_s).leases) == len(GUESTS)
    assert min(e.expires_in_s for e in bench.core.status(bench.now_s).leases) > 3.5


def test_another_node_is_told_each_renewal_by_itself() -> None:
    bench = leased(takes_renewals=False)
    renewals = told(bench, 5.0)
    assert all(len(names) == 1 for names in renewals)
    assert 4 * 4 <= len(renewals) <= 4 * 5


def test_a_lease_that_is_granted_comes_by_itself() -> None:
    bench = CoreBench().with_job()
    bench.step(Attached("n0", 1, takes_renewals=True))
    bench.step(Offered(1, (offer("g0"), offer("g1"))))
    assert bench.kinds().count("lease") == 2


def test_a_node_obeys_each_renewal_and_leaves_out_the_one_that_it_refuses(
    tmp_path: Path,
) -> None:
    taken: list[str] = []

    def obey(command: pb.NodeCommand) -> None:
        if command.lease.replica == "g1":
            raise RefusedError("no such model")
        taken.append(command.lease.replica)

    events = EventLog(tmp_path, "node")
    session = SchedulerSession("127.0.0.1:1", NodeIdentity("n0"), list, obey, events)
    leases = [pb.Lease(replica=name, epoch=1, ttl_s=5.0) for name in GUESTS]
    for order in _apart(pb.NodeCommand(renewals=pb.Renewals(leases=leases))):
        session._take(order)
    events.close()
    assert taken == ["g0", "g2", "g3"]


def test_a_node_that_was_told_something_gets_no_heartbeat_besides(tmp_path: Path) -> None:
    service = SchedulerService(CoreBench().core, InMemoryStore(), EventLog(tmp_path, "scheduler"))
    told, silent = service._queues[1], service._queues[2] = CommandQueue(), CommandQueue()
    service._tell(Command(1, pb.NodeCommand(relays=pb.Relays())))
    service._beat()
    assert (told.waiting, silent.waiting) == (1, 1)
    service._beat()
    assert (told.waiting, silent.waiting) == (2, 2), "never two beats of silence"


@pytest.mark.parametrize("command", [pb.NodeCommand(), pb.NodeCommand(relays=pb.Relays())])
def test_other_commands_stay_as_they_are(command: pb.NodeCommand) -> None:
    assert [*_apart(command)] == [command]
