"""Training runs on a running cluster: killed, resumed, started anew, taken over; no engine starts.

Schedulers, nodes, gateway and trainers are processes; the engines are stand-ins that count.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.addresses import free_port
from rose.client import RolloutClient
from tests.engine.fleet.little_cluster import JOB, LittleCluster, little_cluster, start_python
from tests.harness.waiting import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


class TrainerProcess:
    """One life of a trainer with a root."""

    def __init__(self, cluster: LittleCluster, root: str, **given: Any) -> None:
        told = {
            "scheduler": cluster.addresses,
            "root": str(cluster.folder / root),
            "port": free_port(),
            "seed": cluster.seed,
            "name": f"run-{root}",
            **given,
        }
        script = str(Path(__file__).with_name("run_trainer.py"))
        log = cluster.folder / f"trainer-{root}.log"
        self._process = start_python(script, json.dumps(told), log=log)

    async def __call__(self, command: str) -> dict[str, Any]:
        """Its answer; {} when it died on the way."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        async with asyncio.timeout(PATIENCE_S):
            line = await asyncio.to_thread(self._process.stdout.readline)
        said: dict[str, Any] = json.loads(line) if line else {}
        return said

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def trainer(cluster: LittleCluster, root: str, **given: Any) -> Iterator[TrainerProcess]:
    """A trainer that is killed at the end, if not before."""
    process = TrainerProcess(cluster, root, **given)
    try:
        yield process
    finally:
        process.kill()


async def serving(cluster: LittleCluster, version: int) -> None:
    """Wait until every replica serves it, as the gateway says."""
    async with RolloutClient(cluster.urls, job=JOB) as client, asyncio.timeout(PATIENCE_S):
        while (await client.versions()).serving(version) < len(cluster.hosts):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


def starts(cluster: LittleCluster) -> int:
    return sum(len(cluster.calls(node, "start")) for node in cluster.hosts)


async def test_a_killed_trainer_resumes_and_one_that_takes_over_starts_anew(tmp_path: Path) -> None:
    async with little_cluster(tmp_path, nodes=2, gateways=1) as cluster:
        with trainer(cluster, "a") as first:
            assert await first("begin") == {"anew": 1}
            assert await first("step") == {"version": 2}
            await cluster.served("gw0")
            await serving(cluster, 2)
            engines = starts(cluster)
        # The first was killed, and its root can be taken at once.
        with trainer(cluster, "a", dies_before=4) as second:
            assert await second("begin") == {"resumed": 2, "bit_for_bit": True}
            assert await second("step") == {"version": 3}
            assert await second("step") == {}, "version 4 is durable, and nobody was told"
        with trainer(cluster, "a") as third:
            assert await third("begin") == {"resumed": 4, "bit_for_bit": True}
            await serving(cluster, 4)
            leader = await cluster.led()
            assert cluster.members[leader].end(signal.SIGKILL) != 0
            await cluster.led(but=leader)
            with trainer(cluster, "b", wait_s=0) as refused:
                said = await refused("begin")
                assert said["error"] == "RunHeldError"
                assert f"job {JOB} is held by run run-a on" in said["line"]
                assert "\n" not in said["line"]
            assert await third("step") == {"version": 5}
            with trainer(cluster, "b", take_over=True) as other:
                assert await other("begin") == {"anew": 6}
                said = await third("step")
                assert said["error"] == "RunFencedError"
                assert "has lost job grpo to run run-b on" in said["line"]
                await serving(cluster, 6)
                assert await other("step") == {"version": 7}
                await serving(cluster, 7)
        assert starts(cluster) == engines == 2
