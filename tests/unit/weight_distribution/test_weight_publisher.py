"""A trainer's publication is durable, told to the scheduler, and outlives its restarts."""

import asyncio
import time
from pathlib import Path

import grpc.aio
import numpy as np
import pytest

from rose.addresses import free_port
from rose.errors import UnavailableError
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from rose.weight_distribution import WeightPublisher
from rose.weight_distribution import weight_publisher as publisher
from tests.harness.waiting import PATIENCE_S, until_async
from weight_transfer import ChunkStore, SigningKey, TensorBits, VersionPublisher


class StandInScheduler(SchedulerServicer):
    """Takes every job and version."""

    def __init__(self) -> None:
        self.announced: list[pb.AnnounceVersionRequest] = []

    async def RegisterJob(self, request, context):  # type: ignore[no-untyped-def,override]  # noqa: ANN001, ANN201 - a stand-in
        return pb.RegisterJobReply()

    async def AnnounceVersion(self, request, context):  # type: ignore[no-untyped-def,override]  # noqa: ANN001, ANN201 - a stand-in
        self.announced.append(request)
        return pb.AnnounceVersionReply()


def _tensors(step: int) -> dict[str, TensorBits]:
    bits = np.arange(1_024, dtype=np.uint16)
    bits[::8] += np.uint16(step)
    return {"w": TensorBits("w", "bfloat16", (32, 32), bits)}


async def _serve(scheduler: StandInScheduler, port: int) -> grpc.aio.Server:
    server = make_server()
    add_SchedulerServicer_to_server(scheduler, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


async def test_a_receipt_says_what_the_step_cost(tmp_path: Path) -> None:
    scheduler, port = StandInScheduler(), free_port()
    server = await _serve(scheduler, port)
    key = SigningKey.generate()
    address = f"127.0.0.1:{port}"
    async with WeightPublisher("job", address, tmp_path, free_port(), key) as weights:
        receipt = await weights.publish(1, 0, _tensors(0), _tensors(1))
    await server.stop(0)
    assert (receipt.version, receipt.full_bytes, receipt.density) == (1, 2_048, 1 / 8)
    assert receipt.wire_bytes > 0
    assert ChunkStore(tmp_path).versions() == (1,)
    assert [(each.job, each.version, each.parent) for each in scheduler.announced] == [
        ("job", 1, 0)
    ]


async def test_a_scheduler_that_restarts_is_waited_for(tmp_path: Path) -> None:
    scheduler, port = StandInScheduler(), free_port()
    server = await _serve(scheduler, port)
    key = SigningKey.generate()
    async with WeightPublisher("job", f"127.0.0.1:{port}", tmp_path, free_port(), key) as weights:
        await server.stop(0)
        publishing = asyncio.create_task(weights.publish(1, 0, _tensors(0), _tensors(1)))
        await asyncio.sleep(0.1)
        assert not publishing.done()
        server = await _serve(scheduler, port)
        await publishing
    await server.stop(0)
    assert len(scheduler.announced) == 1


async def test_without_a_scheduler_the_error_says_that_the_version_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, port = StandInScheduler(), free_port()
    server = await _serve(scheduler, port)
    key = SigningKey.generate()
    async with WeightPublisher("job", f"127.0.0.1:{port}", tmp_path, free_port(), key) as weights:
        await server.stop(0)
        monkeypatch.setattr(publisher, "ANNOUNCE_TIMEOUT_S", 0.1)
        with pytest.raises(UnavailableError, match="version 1 is published but"):
            await weights.publish(1, 0, _tensors(0), _tensors(1))
    assert ChunkStore(tmp_path).versions() == (1,)


async def test_a_publisher_signs_its_newest_version_anew_before_that_expires(
    tmp_path: Path,
) -> None:
    key, store = SigningKey.generate(), ChunkStore(tmp_path)
    began_s = time.time()
    before = VersionPublisher(store, "job", "t", key, clock=lambda: began_s - 80_000.0)
    soon_s = before.publish(1, 0, _tensors(0), _tensors(1)).expires_s
    port = free_port()
    server = await _serve(StandInScheduler(), port)
    async with WeightPublisher("job", f"127.0.0.1:{port}", tmp_path, free_port(), key):
        await until_async(
            lambda: store.get_manifest(1).expires_s > soon_s, PATIENCE_S, "it is signed anew"
        )
    await server.stop(0)
    assert store.get_manifest(1).expires_s >= began_s + 80_000.0
