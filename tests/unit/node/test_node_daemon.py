"""A whole node over real gRPC and HTTP: a real scheduler, a stand-in engine."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_scheduler import HarvestMode
from rose.engines import EngineSpec, launch
from rose.eventlog import EventLog
from rose.node import NodeConfig, NodeDaemon, supervisor
from rose.process import ProcessSpec, group_alive
from rose.publish import WeightPublisher
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel, make_server
from rose.rpc.rose_pb2_grpc import SchedulerStub, add_SchedulerServicer_to_server
from rose.scheduler import LeaseTimes, SchedulerCore, SchedulerService
from rose.scheduler.saved import load
from rose.store import InMemoryStore
from weight_transfer import SigningKey, TensorBits

STANDIN = Path(__file__).with_name("standin_engine.py")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tensors(step: int) -> dict[str, TensorBits]:
    bits = np.arange(4_096, dtype=np.uint16)
    bits[::7] += np.uint16(step)
    return {"w": TensorBits("w", "bfloat16", (64, 64), bits)}


class Bench:
    """Scheduler, publisher and one node, all in this process but the engine."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.key = SigningKey.generate()
        self.events = EventLog(folder, "scheduler")
        times = LeaseTimes(ttl_s=1.0, renew_s=0.1, cooldown_s=0.05)
        core = SchedulerCore(load(InMemoryStore()), HarvestMode.ACTIVE, times)
        self.service = SchedulerService(core, InMemoryStore(), self.events)
        self.server = make_server()
        add_SchedulerServicer_to_server(self.service, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.channel = make_channel(self.address)
        self.stub = SchedulerStub(self.channel)
        self.publisher = WeightPublisher(
            "job", self.address, folder / "published", _free_port(), self.key, corrupt_every=1
        )
        self.node = NodeDaemon(self._config(kind))

    def _config(self, kind: str) -> NodeConfig:
        model = self.folder / "model"
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (model / name).write_text("{}")
        config: dict[str, Any] = {
            "node": "n0",
            "scheduler": self.address,
            "run_dir": str(self.folder / "run"),
            "log_dir": str(self.folder / "logs"),
            "verify_key": self.key.verify_key.hex,
            "replicas": [{"id": "r0", "kind": kind, "model_dir": str(model), "port": _free_port()}],
        }
        if kind == "guest":
            config["host"] = {"page": str(self.folder / "page"), "pid": os.getpid()}
        return NodeConfig.model_validate(config)

    def calls(self, name: str) -> list[dict[str, Any]]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [record for line in lines if (record := json.loads(line))["call"] == name]

    def noted(self, event: str) -> list[dict[str, Any]]:
        lines = (self.folder / "logs" / "events-n0.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["event"] == event]

    async def row(self) -> pb.Replica | None:
        rows = (await self.stub.Snapshot(pb.SnapshotRequest())).replicas
        return rows[0] if rows else None

    async def until(self, what: str, holds: Callable[[pb.Replica], bool]) -> pb.Replica:
        try:
            async with asyncio.timeout(8):
                while True:
                    row = await self.row()
                    if row is not None and holds(row):
                        return row
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"never {what}: {await self.row()}") from None

    async def until_noted(self, event: str, times: int = 1) -> dict[str, Any]:
        async with asyncio.timeout(8):
            while True:
                if len(found := self.noted(event)) >= times:
                    return found[-1]
                await asyncio.sleep(0.02)

    async def publish(self, version: int) -> None:
        await self.publisher.publish(version, version - 1, _tensors(version - 1), _tensors(version))


@pytest.fixture(params=["dedicated"])
async def bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, request.param)

    def standin(spec: EngineSpec) -> ProcessSpec:
        argv = (sys.executable, "-S", str(STANDIN), str(spec.port), str(bench.journal))
        return ProcessSpec(spec.name, argv, log=spec.log)

    monkeypatch.setattr(launch, "process_spec", standin)
    monkeypatch.setattr(launch, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr("rose.node.gauge.INTERVAL_S", 0.02)
    await bench.server.start()
    ticking = asyncio.create_task(bench.service.tick())
    await bench.publisher.start()
    running = asyncio.create_task(bench.node.run())
    yield bench
    bench.node.stop()
    await running
    ticking.cancel()
    await bench.publisher.close()
    await bench.channel.close()
    await bench.server.stop(0)
    bench.events.close()


async def test_a_lease_opens_admission_and_a_stop_drains_and_ends_the_engine(
    bench: Bench,
) -> None:
    row = await bench.until("leased", lambda row: row.leased)
    await bench.until_noted("lease_taken")
    assert bench.calls("admit")[0]["epoch"] == row.lease_epoch
    pid = bench.calls("start")[0]["pid"]
    bench.node.stop()
    await bench.until_noted("node_stopped")
    assert [call["epoch"] for call in bench.calls("drain")] == [row.lease_epoch]
    assert not group_alive(pid)


async def test_a_killed_engine_comes_back_under_a_new_lease_and_caught_up(bench: Bench) -> None:
    await bench.publish(1)
    await bench.publish(2)
    first = await bench.until("caught up", lambda row: row.leased and row.policy_version == 2)
    os.kill(bench.calls("start")[0]["pid"], signal.SIGKILL)
    again = await bench.until(
        "leased anew",
        lambda row: row.lease_epoch > first.lease_epoch and row.policy_version == 2,
    )
    assert again.healthy
    await bench.until_noted("lease_taken", times=2)
    second_pid = bench.calls("start")[1]["pid"]
    applied = [call["version"] for call in bench.calls("apply") if call["pid"] == second_pid]
    assert applied == [1, 2], "the new engine starts from the base"
    admitted = [call["epoch"] for call in bench.calls("admit") if call["pid"] == second_pid]
    assert min(admitted) > first.lease_epoch, "and never serves under the old lease"
    assert bench.noted("chunk_rejected"), "the publisher corrupts chunks, which are fetched again"


async def test_an_engine_that_cannot_prove_a_version_is_ended_and_rebased(bench: Bench) -> None:
    unproven = bench.folder / "unproven"
    unproven.touch()
    await bench.publish(1)
    await bench.until_noted("quarantined")
    unproven.unlink()
    await bench.until("proven", lambda row: row.healthy and row.policy_version == 1)
    assert len(bench.calls("start")) == 2


async def test_a_replica_without_a_page_is_measured_all_the_same(bench: Bench) -> None:
    async with asyncio.timeout(3):
        while True:
            guests = (await bench.stub.Snapshot(pb.SnapshotRequest())).guests
            if guests and guests[0].tokens_total:
                break
            await asyncio.sleep(0.02)
    assert (guests[0].running, guests[0].tokens_total, guests[0].mode) == (2, 7, "none")


async def test_a_revoked_lease_is_drained_and_granted_anew(bench: Bench) -> None:
    first = await bench.until("leased", lambda row: row.leased)
    await bench.stub.Revoke(pb.RevokeRequest(replica="r0", reason="drill"))
    await bench.until("leased anew", lambda row: row.lease_epoch > first.lease_epoch)
    ended = await bench.until_noted("lease_ended")
    assert (ended["epoch"], ended["reason"]) == (first.lease_epoch, "drill")


async def test_a_lost_scheduler_ends_the_lease_by_silence(bench: Bench) -> None:
    await bench.until("leased", lambda row: row.leased)
    await bench.server.stop(0)
    taken = await bench.until_noted("lease_taken_back")
    assert taken["reason"] == "expired"
    await bench.until_noted("lease_ended")
    assert bench.calls("drain")


@pytest.mark.parametrize("bench", ["guest"], indirect=True)
async def test_off_ends_the_guest_after_its_turns_and_active_brings_it_back(bench: Bench) -> None:
    await bench.until("leased", lambda row: row.leased)
    await bench.until_noted("lease_taken")
    await bench.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF))
    await bench.until_noted("engine_ended")
    assert bench.calls("drain"), "its turns were handed back first"
    assert len(bench.calls("start")) == 1
    await bench.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_ACTIVE))
    await bench.until("leased anew", lambda row: row.leased)
    assert len(bench.calls("start")) == 2


@pytest.mark.parametrize("bench", ["guest"], indirect=True)
async def test_the_kill_file_ends_the_guest_whatever_the_scheduler_says(bench: Bench) -> None:
    await bench.until("leased", lambda row: row.leased)
    kill_file = bench.folder / "run" / "KILL"
    kill_file.touch()
    await bench.until_noted("engine_ended")
    await bench.until("not leased", lambda row: not row.leased)
    kill_file.unlink()
    await bench.until("leased anew", lambda row: row.leased)


async def test_an_engine_that_never_admits_is_replaced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.node.tenant.RETRY_PAUSE_S", 0.01)
    (bench.folder / "closed").touch()
    await bench.until_noted("engine_unwanted")
    (bench.folder / "closed").unlink()
    await bench.until_noted("lease_taken")
    assert len(bench.calls("start")) == 2
