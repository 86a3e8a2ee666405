"""A node that stood still obeys nothing that waited for it, and counts the time in its leases."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

from rose.clock import Stall
from rose.logs.eventlog import EventLog
from rose.node.lease import EngineUp, LeaseAgent
from rose.node.orders import SchedulerCaps
from rose.node.replica_client import ReplicaClient
from rose.node.scheduler_session import STALL_S, NodeIdentity, SchedulerSession
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from tests.harness.waiting import PATIENCE_S


class Clock:
    """A clock that goes on only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def grant(epoch: int) -> pb.NodeCommand:
    return pb.NodeCommand(lease=pb.Lease(replica="g0", epoch=epoch, ttl_s=5.0))


async def test_a_grant_that_waited_for_a_node_that_stood_still_is_not_obeyed(
    tmp_path: Path,
) -> None:
    clock = Clock()
    # Content of the node's streams. The grant under epoch 8 was sent before the stall ended.
    streams = iter([[grant(7), grant(8)], [grant(9)]])

    class Scheduler(SchedulerServicer):
        async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            for command in next(streams):
                await context.write(command)
            await asyncio.Event().wait()

    server = make_server()
    add_SchedulerServicer_to_server(Scheduler(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    obeyed: asyncio.Queue[int] = asyncio.Queue()

    def obey(command: pb.NodeCommand) -> None:
        obeyed.put_nowait(command.lease.epoch)
        if command.lease.epoch == 7:
            clock.now_s += 30.0

    events = EventLog(tmp_path, "n0")
    session = SchedulerSession(
        f"127.0.0.1:{port}", NodeIdentity("n0"), list, obey, events, clock=clock
    )
    running = asyncio.create_task(session.run())
    async with asyncio.timeout(PATIENCE_S):
        assert [await obeyed.get() for _ in range(2)] == [7, 9]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    events.close()
    lines = (tmp_path / "events-n0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["session_stalled"]


def test_only_a_gap_between_two_looks_is_a_stall() -> None:
    clock = Clock()
    stall = Stall(STALL_S, clock)
    for _ in range(10):
        clock.now_s += STALL_S
        assert not stall.look()
    clock.now_s += 3.0
    assert stall.look() == 3.0
    assert not stall.look()


def test_leases_and_silence_count_the_time_of_a_suspended_machine(tmp_path: Path) -> None:
    clock, events = Clock(), EventLog(tmp_path, "n0")
    caps = SchedulerCaps(clock)
    client = cast(ReplicaClient, None)
    agent = LeaseAgent("g0", client, events, lambda word: None, lambda reason: None, clock)
    agent.happened(EngineUp())
    assert agent.grant(7, 5.0)
    assert agent.lease_epoch() == 7
    clock.now_s += 6.0
    assert agent.lease_epoch() is None
    assert agent.held() is None
    assert caps.cut_off
    events.close()
