"""A node's relay: named to the scheduler, told of its neighbours, serving what it may not need."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from node_bench import NodeBench

from rose.addresses import free_port
from rose.errors import ConfigError
from rose.node import NodeDaemon
from rose.rpc import rose_pb2 as pb
from tests.harness.waiting import PATIENCE_S, until_async
from weight_transfer import ChunkStore
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, fetch_version

NEIGHBOUR = "http://10.0.0.9:1"


class Neighbour:
    """The stream of another node: hears who relays."""

    def __init__(self, bench: NodeBench) -> None:
        self.told: list[str] = []
        self._bench = bench
        self._hearing = asyncio.create_task(self._hear())

    async def _reports(self) -> AsyncIterator[pb.NodeReport]:
        hello = pb.Hello(protocol=2, cluster="lon", relay_url=NEIGHBOUR)
        yield pb.NodeReport(node="n9", hello=hello)
        while True:
            await asyncio.sleep(0.2)
            yield pb.NodeReport(node="n9", telemetry=pb.Telemetry())

    async def _hear(self) -> None:
        async for command in self._bench.stub.Attach(self._reports()):
            if command.HasField("relays"):
                self.told = list(command.relays.urls)

    async def leave(self) -> None:
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)


async def fetched_from(bench: NodeBench, relay: str, **headers: str) -> int:
    """Return the bytes of version 1, fetched where nobody is there but the relay."""
    async with aiohttp.ClientSession(headers=headers) as session:
        receiving = DownloadLimits(ChunkStore(bench.folder / "other"), Caps())
        fetcher = ChunkFetcher(session, receiving, "", [relay])
        fetched = await fetch_version(
            fetcher, "http://127.0.0.1:9", "job", 1, bench.key.verify_key, lambda _: None, set()
        )
        receiving.close()
    return fetched.wire_bytes


BENCH = {"kind": "dedicated"}
pytestmark = pytest.mark.usefixtures("standins")


async def test_a_nodes_relay_is_known_to_its_neighbours_and_serves_them(bench: NodeBench) -> None:
    token = bench.folder / "token"
    token.write_text("secret")
    bench.settings |= {
        "cluster": "lon",
        "relay": {"host": "127.0.0.1", "port": free_port()},
        "transport": {"token_file": str(token)},
    }
    async with bench.running() as node:
        neighbour = Neighbour(bench)
        url = f"http://127.0.0.1:{bench.settings['relay']['port']}"
        both = sorted([NEIGHBOUR, url])
        await until_async(lambda: neighbour.told == both, PATIENCE_S, "both are known")
        source = node._network._source
        assert source

        def neighbours() -> set[str]:
            route = source.fetcher.route("chunk", "http://origin")
            return {*route.before, *route.holders}

        # The order comes in the same step, over a stream of its own.
        await until_async(neighbours, PATIENCE_S, "it knows of a neighbour")
        assert neighbours() == {NEIGHBOUR}, "and it knows of its neighbour"
        await neighbour.leave()

        await bench.publish(1)
        await bench.until("up to date", lambda row: row.policy_version == 1)
        assert await fetched_from(bench, url, Authorization="Bearer secret")
        async with aiohttp.ClientSession() as session, session.get(f"{url}/catalog") as answer:
            assert answer.status == 401


async def test_a_relay_serves_a_version_that_its_own_engine_does_not_take(bench: NodeBench) -> None:
    (bench.folder / "unproven").touch()
    bench.settings["relay"] = {"host": "127.0.0.1", "port": free_port()}
    async with bench.running():
        await bench.until("there", lambda row: row.leased)
        await bench.publish(1)
        url = f"http://127.0.0.1:{bench.settings['relay']['port']}"
        assert await fetched_from(bench, url)


async def test_a_relay_that_cannot_listen_is_one_line(bench: NodeBench) -> None:
    taken = bench.publisher.url.rsplit(":", 1)[1]
    bench.settings["relay"] = {"host": "127.0.0.1", "port": int(taken)}
    with pytest.raises(Exception, match="cannot be served") as said:
        await NodeDaemon(bench.config).run()
    assert "\n" not in str(said.value)


def test_a_relay_of_other_machines_needs_certificates_or_the_operators_word(
    bench: NodeBench,
) -> None:
    bench.settings["relay"] = {"host": "10.0.0.7", "port": free_port()}
    with pytest.raises(ConfigError, match="reached from other machines") as said:
        NodeDaemon(bench.config)
    assert "\n" not in str(said.value)
    bench.settings["relay"]["insecure"] = True
    NodeDaemon(bench.config)
