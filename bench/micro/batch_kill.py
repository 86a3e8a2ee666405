"""A batch of many requests while its gateway and scheduler are killed: each is answered once.

    python -m bench.micro.batch_kill [--requests N] [--kills N] [--out FILE]

Prints one JSON object. A scheduler, a gateway with a batch folder, and a node whose replica is a
stand-in engine serve one batch. At even shares of its answers the gateway is killed with SIGKILL
and started anew, and every second time the scheduler too. Exit code 1 unless each request has one
line in the output, with the answer to its own prompt.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.common.processes import BenchProcess, ProcessFleet, python, scheduler_command
from bench.common.report import parser_of, put_judged
from bench.load.standin import StandInEngine
from bench.micro.failover import JOB, FollowingNode, register
from rose.addresses import free_ports
from rose.contract.gateway import GENERATE
from rose.rpc.leader_channel import LeaderChannel

TOKENS = 16
PATIENCE_S = 300.0
LOOK_S = 0.05
KEY = {"Authorization": "Bearer any"}
OVER = ("completed", "failed", "expired", "cancelled")


class BatchCluster(ProcessFleet):
    """Scheduler, gateway and stand-in engine, of which the first two are killed and started."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        scheduler, self._gateway, engine = free_ports(3)
        self.address, self.url = f"127.0.0.1:{scheduler}", f"http://127.0.0.1:{self._gateway}"
        self._scheduler = scheduler
        self._started = 0
        self.engine = StandInEngine.of([engine], folder / "engine.log", ())
        self.add(self.engine)
        self.engine.pace(0.02, 0.01, 8)
        self.running: dict[str, BenchProcess] = {}
        self.start("scheduler")
        self.start("gateway")

    def start(self, which: str) -> None:
        """Start the scheduler or the gateway."""
        self._started += 1
        options = [f"--scheduler={self.address}", f"--batch-dir={self.folder / 'shared'}"]
        commands = {
            "scheduler": scheduler_command(self._scheduler, self.folder, "--harvest=ACTIVE"),
            "gateway": python("rose.main.gateway", f"--port={self._gateway}", *options),
        }
        log = self.folder / f"{which}-{self._started}.log"
        process = BenchProcess(f"{which}-{self._started}", commands[which], log, ()).start()
        self.running[which] = self.add(process)

    def kill(self, which: str) -> None:
        """Kill one with SIGKILL, and start it anew."""
        self.running[which].kill()
        self.members.pop(self.running[which].name)
        self.start(which)


def asked(requests: int) -> bytes:
    """Return the lines of a batch; each prompt is its own."""
    lines = [
        {
            "custom_id": f"ask-{k}",
            "method": "POST",
            "url": GENERATE,
            "body": {"token_ids": [k + 1], "sampling_params": {"max_tokens": TOKENS}},
        }
        for k in range(requests)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class BatchCaller:
    """Caller that tries again while the gateway is away."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def call(self, method: str, path: str, **how: Any) -> bytes:  # noqa: ANN401 -- aiohttp's
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                async with self._session.request(method, path, **how) as answer:
                    if answer.status == 200:
                        return await answer.read()
                    said = await answer.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                said = repr(error)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{method} {path}: {said}")
            await asyncio.sleep(LOOK_S)

    async def begun(self, requests: int) -> str:
        """Upload a file and return the id of its batch."""
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", asked(requests), filename="asks.jsonl")
        file = json.loads(await self.call("POST", "/v1/files", data=form, headers=KEY))
        new = {"input_file_id": file["id"], "endpoint": GENERATE, "completion_window": "24h"}
        new["job"] = JOB
        return str(json.loads(await self.call("POST", "/v1/batches", json=new))["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.call("GET", f"/v1/batches/{batch_id}"))
        return found


async def killed(folder: Path, requests: int, kills: int) -> dict[str, Any]:
    """Run a batch through these kills, and return what came of it."""
    with BatchCluster(folder) as cluster:
        node = FollowingNode(cluster.address, folder, cluster.engine.urls[0])
        following = asyncio.create_task(node.session.run())
        try:
            async with LeaderChannel(cluster.address) as trainer:
                await register(trainer)
            async with aiohttp.ClientSession(cluster.url) as session:
                caller = BatchCaller(session)
                batch_id = await caller.begun(requests)
                began_s = time.monotonic()
                for kill in range(1, kills + 1):
                    due = requests * kill // (kills + 1)
                    while _answered(await caller.batch(batch_id)) < due:  # noqa: ASYNC110
                        await asyncio.sleep(LOOK_S)
                    cluster.kill("gateway")
                    if kill % 2 == 0:
                        cluster.kill("scheduler")
                while (batch := await caller.batch(batch_id))["status"] not in OVER:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
                took_s = time.monotonic() - began_s
                output = b""
                if batch["output_file_id"]:
                    path = f"/v1/files/{batch['output_file_id']}/content"
                    output = await caller.call("GET", path)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            node.events.close()
    rows = [json.loads(line) for line in output.splitlines()]
    times = Counter(row["custom_id"] for row in rows)
    whole = [
        row for row in rows if len(row["response"]["body"]["choices"][0]["token_ids"]) == TOKENS
    ]
    return {
        "requests": requests,
        "status": batch["status"],
        "answered_once": sum(count == 1 for count in times.values()),
        "answered_twice": sum(count > 1 for count in times.values()),
        "whole": len(whole),
        "counts": batch["request_counts"],
        "gateway_kills": kills,
        "scheduler_kills": kills // 2,
        "seconds": round(took_s, 1),
        "requests_s": round(requests / took_s, 1),
    }


def _answered(batch: dict[str, Any]) -> int:
    counts = batch["request_counts"]
    return int(counts["completed"] + counts["failed"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "bench.micro.batch_kill", requests=10_000, kills=6)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(killed(Path(folder), options.requests, options.kills))
    good = found["answered_once"] == found["whole"] == options.requests
    return put_judged(found, options.out, good=good)


if __name__ == "__main__":
    sys.exit(main())
