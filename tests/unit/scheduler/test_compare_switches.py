"""`rose compare` switches guests by the scheduler's own calls, and puts them back."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from service_cases import Bench, FakeNode, running, shows

from elastic_scheduler.capacity import CapacityPolicy
from rose.cli.cluster.compare import NodeLending
from rose.compare.node_metrics import Latencies, Reading
from rose.compare.plan import Plan
from rose.compare.run import ComparisonRun
from rose.errors import RefusedError
from rose.operate.client import PolicyClient
from rose.rpc import rose_pb2 as pb
from tests.fakes.memory_store import InMemoryStore


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with running(Bench(InMemoryStore(), tmp_path)) as bench:
        yield bench


class NoTime:
    """Clock of a comparison that waits for nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def test_a_comparison_drains_the_guests_of_one_node_and_puts_them_back(bench: Bench) -> None:
    node, other = FakeNode(bench.stub), FakeNode(bench.stub, "n1")
    node.offer()
    other.offer(replica="g1", url="http://g1")
    await shows(bench, lambda snapshot: len(snapshot.replicas) == 2)
    seen: list[bool] = []
    nothing = Latencies({math.inf: 0.0}, 0.0, 0.0)

    def read() -> Reading:
        assert isinstance(bench.store, InMemoryStore)
        stopped = {key for key in bench.store.now if key.startswith("harvest/")}
        assert stopped <= {"harvest/g0"}, "the other node's guest is left alone"
        seen.append(bool(stopped))
        return Reading(nothing, nothing, 0.0, 0.0, 0.0)

    def compare() -> int:
        lending = NodeLending(PolicyClient(bench.address), "n0")
        lending.check_policy()
        on, off = pb.HARVEST_MODE_ACTIVE, pb.HARVEST_MODE_HOLD_AND_DRAIN
        run = ComparisonRun(Plan(pairs=2), lending, read, lambda _: None, on, off, NoTime())
        return len(run.measure())

    assert await asyncio.to_thread(compare) == 2
    assert (seen.count(True), seen.count(False)) == (4, 5)
    assert not (await bench.stub.Snapshot(pb.SnapshotRequest())).overrides
    await node.leave()
    await other.leave()


async def test_a_node_that_only_advises_is_not_compared(bench: Bench) -> None:
    node = FakeNode(bench.stub)
    node.offer()
    await shows(bench, lambda snapshot: len(snapshot.replicas) == 1)
    client = PolicyClient(bench.address)
    policy = CapacityPolicy(name="careful")
    await asyncio.to_thread(client.apply, policy)
    with pytest.raises(RefusedError, match="Advisory"):
        await asyncio.to_thread(NodeLending(client, "n0").check_policy)
    await node.leave()
