"""Nodes that are none, and commands of `rose` against a scheduler in this process."""

import asyncio
from typing import Any

from service_cases import Bench, FakeNode, shows

from rose.cli.main import main
from rose.rpc import rose_pb2 as pb

HOST: dict[str, Any] = {
    "busy_share": 0.31, "kv_share": 0.83, "running": 3, "waiting": 1, "window_requests": 40,
    "window_s": 10.0, "ttft_p95_s": 0.41, "ttft_target_s": 0.5, "tpot_p95_s": 0.2,
    "tpot_target_s": 0.15, "source": "plugin",
}  # fmt: skip
AT_WORK: dict[str, Any] = {
    "state": "healthy", "mode": "run", "reason": "ok", "duty": 0.6, "tokens_total": 900,
    "kv_bytes": 2 << 30,
}  # fmt: skip


async def rose(bench: Bench, *words: str) -> int:
    return await asyncio.to_thread(main, [*words, "--scheduler", bench.address])


async def serving(bench: Bench, number: int = 0, *, obeys: bool = True) -> FakeNode:
    """A node whose host serves and whose guest works."""
    node = FakeNode(bench.stub, f"serving-{number}", obeys=obeys, release="0.3.0.dev0")
    guest = f"guest-{number}"
    node.offer(replica=guest)
    host = pb.HostTelemetry(node=node.node, **HOST)
    node.say(
        telemetry=pb.Telemetry(host=host, guests=[pb.GuestTelemetry(replica=guest, **AT_WORK)])
    )
    await node.hears("harvest")
    await shows(bench, lambda now: guest in [each.replica for each in now.guests])
    return node


def gone(node: FakeNode, number: int = 0) -> None:
    """Its guest ended, as it measured."""
    guest = pb.GuestTelemetry(replica=f"guest-{number}", state="stopped", held_bytes=0)
    node.say(telemetry=pb.Telemetry(guests=[guest]))


async def told_off(node: FakeNode) -> None:
    while (await node.hears("harvest")).harvest.mode != pb.HARVEST_MODE_OFF:
        continue
