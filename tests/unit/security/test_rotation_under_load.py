"""A server whose certificate changes while many connect answers all of them, and lives on.

gRPC replaces credentials without a lock: in each handshake, that ends the process within seconds.
"""

import asyncio
from pathlib import Path

from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel, make_server
from rose.rpc.rose_pb2_grpc import (
    SchedulerServicer,
    SchedulerStub,
    add_SchedulerServicer_to_server,
)
from rose.security import Role
from tests.certificates import Certificates
from tests.patience import PATIENCE_S

CLIENTS, HANDSHAKES, ROTATIONS = 4, 20, 5


class Answering(SchedulerServicer):
    async def Snapshot(self, request: object, context: object) -> pb.SnapshotReply:
        return pb.SnapshotReply()


async def test_every_handshake_beside_rotations_succeeds(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "ca")
    own, operator = certificates.of(Role.SCHEDULER, "s"), certificates.of(Role.OPERATOR, "o")
    server = make_server()
    add_SchedulerServicer_to_server(Answering(), server)
    port = server.add_secure_port("127.0.0.1:0", own.server_credentials())
    await server.start()
    done = 0

    async def connect() -> None:
        nonlocal done
        for _ in range(HANDSHAKES):
            async with make_channel(f"127.0.0.1:{port}", operator) as channel:
                await SchedulerStub(channel).Snapshot(pb.SnapshotRequest(), timeout=PATIENCE_S)
            done += 1

    clients = [asyncio.create_task(connect()) for _ in range(CLIENTS)]
    try:
        for rotation in range(1, ROTATIONS + 1):
            # Spread over the handshakes, however fast these are.
            while done < rotation * CLIENTS * HANDSHAKES // (ROTATIONS + 1):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            certificates.ca.issue(Role.SCHEDULER, "s")
        await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await server.stop(0)
    assert done == CLIENTS * HANDSHAKES
