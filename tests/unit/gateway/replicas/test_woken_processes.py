"""SIGSTOPped process waking up with an old lease: replicas under a gateway, and a gateway itself.

Both are processes of their own here, since a test cannot stop itself.
"""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import grpc
import pytest
from scheduler_cases import FakeScheduler, row

from rose.rpc import rose_pb2, rose_pb2_grpc
from tests.fakes.replica import StandInReplica
from tests.harness.processes import Forked
from tests.harness.waiting import PATIENCE_S
from tests.unit.gateway.gateway_cases import begin, calling, entry, until
from tests.unit.gateway.wire_cases import VLLM, ask, vllm_body

TTL_S = 0.4
REPLICA = """
import asyncio, sys
from tests.fakes.replica import StandInReplica

async def main():
    async with StandInReplica(version=1, delay_s=0.05) as replica:
        print(replica.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Forked]:
    program = tmp_path / "replica.py"
    program.write_text(REPLICA)
    with Forked(str(program), stdout=True) as process:
        yield process


async def test_what_a_woken_replica_says_under_its_old_lease_reaches_nobody(
    replica: Forked,
) -> None:
    async with StandInReplica(version=2) as other, calling(stall_s=9) as (gw, http):
        url = await replica.line()
        stopped = entry(other, "guest-0", url=url, policy_version=1)
        gw.set_table((stopped,))
        turn = begin(http, vllm_body(40))
        stats = gw.stats
        await until(lambda: stats.tokens["guest-0"] >= 3)
        replica.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)  # Tokens that it has sent arrive before its lease is over.
        # Its node fell silent, so its lease is over; the next one has another epoch.
        gw.set_table((entry(other, "own-0"),))
        had = stats.tokens["guest-0"]
        replica.send_signal(signal.SIGCONT)
        status, answer, _ = await turn
        gw.set_table((entry(other, "guest-0", url=url, lease_epoch=2, healthy=False),))
        await asyncio.sleep(0.2)
        assert stats.tokens["guest-0"] == had
        assert gw.status().live_turns == {"guest-0": 0}
    assert (status, answer["choices"][0]["token_ids"]) == (200, [*range(101, 141)])
    versions = [(span["version"], span["start"], span["end"]) for span in answer["versions"]]
    assert versions == [(1, 0, had), (2, had, 40)]


async def usable(url: str) -> int:
    """Replicas that the gateway would use; -1 while it does not answer."""
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as reply:
            count: int = (await reply.json())["replicas"]
            return count
    except aiohttp.ClientError:
        return -1


async def test_a_woken_gateway_sends_nothing_under_the_leases_that_it_knew() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        own_port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{own_port}"
    options = ["--port", str(own_port), "--scheduler", f"127.0.0.1:{port}"]
    options += ["--table-ttl-s", str(TTL_S)]
    async with AsyncExitStack() as stack:
        gateway = stack.enter_context(Forked("-m", "rose.main.gateway", *options, stdout=True))
        replica = await stack.enter_async_context(StandInReplica())
        table = rose_pb2.ReplicaTable(replicas=[row(epoch=1, url=replica.url)])
        scheduler = FakeScheduler(table, every_s=TTL_S / 4)
        rose_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)
        await server.start()
        async with asyncio.timeout(PATIENCE_S):
            await gateway.line()
            while await usable(url) != 1:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{url}/health") as reply:
                await reply.read()
            gateway.send_signal(signal.SIGSTOP)
            await server.stop(None)
            # One on a connection that it has, the others on new ones: all are there when the
            # process wakes up, before its loop has looked at any clock.
            turns = [
                asyncio.create_task(ask(http, url + VLLM, vllm_body(3, request_id=f"r{k}")))
                for k in range(5)
            ]
            await asyncio.sleep(2 * TTL_S)
            gateway.send_signal(signal.SIGCONT)
            await asyncio.sleep(TTL_S)
            assert await usable(url) == 0
            assert replica.requests == [], "its table was as old as it looked"
            for turn in turns:
                turn.cancel()
