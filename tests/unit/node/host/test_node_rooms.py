"""A node of several hosts: each is found, guarded and measured by itself, and leaves by itself."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from found_hosts import FolderHost
from node_bench import NodeBench
from prometheus_client import generate_latest

from executor import LatencyRecord
from rose.addresses import free_port
from rose.node import NodeDaemon
from rose.node.guest.memory_gauges import Gpus
from rose.node.host import summed
from rose.process.child import group_alive
from rose.rpc import rose_pb2 as pb
from tests.fakes.cuda.nvml import CARD, StandInReader

GPU = "GPU-0a"


class RoomsBench(NodeBench):
    """With the node in this process, and a folder in place of a host."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.hosts: dict[str, FolderHost] = {}
        super().__init__(folder, kind, id="guest")
        self.settings["replicas"][0]["kind"] = "guest"
        self.settings["discover"] = {"folder": str(self.shared)}

    def host(self, name: str, *devices: str) -> FolderHost:
        self.hosts[name] = FolderHost(self.shared, name, *devices)
        self.hosts[name].host.seat.start()
        return self.hosts[name]

    def ended(self, name: str) -> None:
        self.hosts.pop(name).close()

    async def rows(self, what: str, holds: Callable[[dict[str, pb.Replica]], Any]) -> Any:
        async def held() -> dict[str, pb.Replica] | None:
            seen = await self.stub.Snapshot(pb.SnapshotRequest())
            rows = {row.id: row for row in seen.replicas}
            return rows if holds(rows) else None

        return await self.awaited(what, held)

    async def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        await super().close()

    def metrics(self) -> str:
        return generate_latest(self.node._metrics.registry).decode()


BENCH = {"bench": RoomsBench, "kind": "dedicated"}
pytestmark = pytest.mark.usefixtures("standins")


@pytest.fixture
async def running(bench: RoomsBench) -> AsyncIterator[None]:
    gpus = Gpus(lambda: StandInReader(replace(CARD, uuid=GPU)))
    async with bench.running(NodeDaemon(bench.config, gpus)):
        yield


def both_leased(rows: dict[str, pb.Replica]) -> bool:
    return len(rows) == 2 and all(row.leased for row in rows.values())


async def test_each_host_has_a_guest_that_goes_with_it(bench: RoomsBench, running: None) -> None:
    for name in "ab":
        bench.host(name)
    rows = await bench.rows("both leased", both_leased)
    ports = {int(row.url.rpartition(":")[2]) for row in rows.values()}
    first = bench.settings["replicas"][0]["port"]
    assert (rows.keys(), ports) == ({"guest-0", "guest-1"}, {first, first + 1})
    assert {each["slot"] for each in bench.noted("host_found")} == {0, 1}
    assert 'rose_host_running{host="a"}' in bench.metrics()
    guests = {each["host"]: f"guest-{each['slot']}" for each in bench.noted("host_found")}
    for host, guest in guests.items():
        assert f'rose_guest_host_info{{host="{host}",replica="{guest}"}} 1.0' in bench.metrics()
    assert 'rose_node_hosts{state="guarded"} 2.0' in bench.metrics()
    pids = [bench.node._replicas[name].supervisor.pid for name in ("guest-0", "guest-1")]

    bench.ended("a")
    await bench.until_noted("host_left")
    assert all(pids)
    assert not group_alive(pids[0] or 0)
    assert group_alive(pids[1] or 0), "the other one stays"
    await bench.rows("one left", lambda rows: rows.keys() == {"guest-1"})
    assert '"a"' not in bench.metrics()
    assert "guest-0" not in bench.metrics()

    bench.host("a")
    await bench.rows("both leased again", both_leased)
    assert len(bench.noted("host_found")) == 3
    assert bench.noted("task_died") == []


async def test_turns_of_other_machines_reach_each_guest_by_its_name(
    bench: RoomsBench,
) -> None:
    port = free_port()
    bench.settings["proxy"] = {"host": "127.0.0.1", "port": port}
    async with bench.running() as node:
        bench.host("a")
        rows = await bench.rows("leased", lambda rows: any(row.leased for row in rows.values()))
        assert rows["guest-0"].url == f"http://127.0.0.1:{port}/guest-0"
        async with aiohttp.ClientSession() as http:
            answers = [
                (await http.post(f"{rows['guest-0'].url}/{path}", json={})).status
                for path in ("rose/v1/generate", "rose/v1/drain")
            ]
        # The stand-in takes no turn from somebody without its secret, and the proxy hands none on.
        assert answers == [401, 404]
        assert [each["path"] for each in bench.calls("stranger")] == ["/rose/v1/generate"]
        assert node._background.running()["proxy"]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_page_that_is_cut_short_ends_its_guest_and_nothing_else(
    bench: RoomsBench, running: None
) -> None:
    for name in "ab":
        bench.host(name)
    await bench.rows("both leased", both_leased)
    cut = bench.hosts["a"].path
    bench.hosts["a"].host.seat.cease()
    bench.hosts["a"].host.seat._thread.join()  # type: ignore[union-attr]
    os.truncate(cut, 64)
    await bench.until_noted("host_left")
    await bench.rows("one left", lambda rows: rows.keys() == {"guest-1"})
    (refused,) = bench.noted("host_refused")
    assert (refused["page"], "cut short" in refused["message"]) == (str(cut), True)
    grants = [each["reason"] for each in bench.noted("grant") if each["replica"] == "guest-0"]
    assert grants[-1] in ("page_replaced", "node stops"), "it froze before"
    cut.unlink()
    del bench.hosts["a"]


async def test_two_hosts_on_one_gpu_are_watched_and_have_no_guest(
    bench: RoomsBench, running: None
) -> None:
    for name in "ab":
        bench.host(name, GPU)
    await bench.until_noted("host_without_guest", times=2)
    assert "another host is on one of its GPUs" in bench.noted("host_without_guest")[0]["message"]
    assert bench.calls("start") == []
    assert 'rose_host_running{host="b"}' in bench.metrics()
    bench.ended("b")
    await bench.rows("leased", lambda rows: [row.leased for row in rows.values()] == [True])


async def test_a_second_daemon_leaves_hosts_of_the_first_alone(
    bench: RoomsBench, running: None, tmp_path: Path
) -> None:
    bench.host("a")
    await bench.rows("leased", lambda rows: [row.leased for row in rows.values()] == [True])
    said = bench.config.model_dump() | {"run_dir": tmp_path / "r2", "log_dir": tmp_path / "l2"}
    config = type(bench.config).model_validate(said | {"metrics_port": None, "node": "n1"})

    async def refused() -> Any:
        log = tmp_path / "l2" / "events-n1.jsonl"
        return next(iter(bench._events_in(log, "host_refused")), None)

    async with bench.running(NodeDaemon(config)):
        message = (await bench.awaited("a refusal", refused))["message"]
    assert "has a node daemon already" in message
    assert len(bench.calls("start")) == 1


async def test_eight_hosts_are_told_one_by_one_and_as_one(
    bench: RoomsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settings["replicas"] = []
    async with bench.running() as node:
        for number in range(9):
            host = bench.host(f"h{number}", f"GPU-{number}")
            host.host.tell(running=number, busy_ns=5)
            lane = host.page.take_lane()
            lane.append(LatencyRecord(1, 10**8, 10**7 if number else 10**9, 1, 1, 1, "r"))
            lane.close()

        async def eight() -> pb.SnapshotReply | None:
            seen = await bench.stub.Snapshot(pb.SnapshotRequest())
            return seen if len(seen.hosts) == 8 else None

        seen = await bench.awaited("eight hosts", eight)
        assert sorted(host.host for host in seen.hosts) == [f"h{number}" for number in range(8)]
        assert {host.node for host in seen.hosts} == {"n0"}
        whole = node._reports()[1].telemetry.host
        assert (whole.running, whole.busy_ns, whole.host) == (sum(range(8)), 40, "")
        await bench.until_noted("host_refused")
        assert "at_most" in bench.noted("host_refused")[0]["message"]
        assert node._count_hosts() == {"guarded": 0, "watched": 8, "refused": 1}


def test_the_busiest_host_of_a_node_speaks_for_it() -> None:
    targets = {"ttft_target_s": 0.5, "tpot_target_s": 0.15}
    idle = [pb.HostTelemetry(host=f"h{n}", busy_share=0.1, kv_share=0.2, **targets) for n in "123"]
    busy = pb.HostTelemetry(host="h0", busy_share=0.95, kv_share=0.1, **targets)
    unknown = pb.HostTelemetry(host="h4", **targets)
    whole = summed([*idle, busy, unknown])
    # A mean of 31% would lend beside a host that has no time to spare.
    assert (whole.busy_share, whole.kv_share) == (0.95, 0.2)
    assert not summed([unknown, unknown]).HasField("busy_share")


def test_a_node_whose_hosts_left_tells_no_host(bench: RoomsBench) -> None:
    assert not NodeDaemon(bench.config)._reports()[1].telemetry.HasField("host")


async def test_the_next_daemon_finds_the_hosts_again_and_adopts_their_guests(
    bench: RoomsBench,
) -> None:
    folder = str(bench.settings.pop("discover")["folder"])
    bench.settings["replicas"][0]["orphan_s"] = 20.0
    for name in "ab":
        bench.host(name)
    first = bench.spawn("--discover", folder)
    before = await bench.rows("both leased", both_leased)
    first.kill()
    first.wait()
    bench.spawn("--discover", folder)
    await bench.until_noted("engine_adopted", times=2)
    epochs = {name: row.lease_epoch for name, row in before.items()}
    await bench.rows(
        "both leased anew",
        lambda rows: both_leased(rows) and all(rows[n].lease_epoch > epochs[n] for n in epochs),
    )
    assert len(bench.calls("start")) == 2
