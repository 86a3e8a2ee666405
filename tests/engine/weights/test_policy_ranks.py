"""A policy leaves a trainer of several ranks: gathered on the first, or from each rank's own shard.

Real processes over gloo with FSDP2, a real publisher, and a scheduler in this process.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rose.addresses import free_port
from tests.fakes.memory_store import InMemoryStore
from tests.harness.training_runs import JOB, RunCluster
from weight_transfer import ChunkStore, SigningKey, TensorBits, read_model_dir, restore

pytestmark = [pytest.mark.engine, pytest.mark.starts_others, pytest.mark.timeout(300)]
MAIN = Path(__file__).with_name("policy_rank_main.py")
ENDS_S = 120.0


@pytest.fixture
def cluster(tmp_path: Path) -> RunCluster:
    """Files of a job, and the checkpoint that its replicas start with."""
    key = SigningKey.generate()
    key.save(tmp_path / "key")
    return RunCluster(tmp_path, InMemoryStore(), free_port(), key)


async def trained(cluster: RunCluster, ranks: int, scenario: str) -> None:
    """Run all ranks to their end, which must be a good one, beside a scheduler."""
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    arguments = str(cluster.folder), f"127.0.0.1:{cluster.port}", JOB, str(ranks), scenario
    async with cluster.scheduler():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(MAIN), *arguments),
            env=environ,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), ENDS_S)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    logs = [file.read_text()[-1500:] for file in sorted(cluster.folder.glob("rank-*.log"))]
    assert json.loads(said) == [0] * ranks, "\n".join(logs)


def assert_published(cluster: RunCluster, version: int, root: str = "root") -> None:
    """Assert that nodes would get what the trainer gathered, bit for bit."""
    wanted = read_model_dir(cluster.folder / f"gathered-{version}")
    base = read_model_dir(cluster.folder / "checkpoint")
    found = restore(ChunkStore(cluster.folder / root), version, base)
    assert_equal(found, wanted)


async def test_ranks_publish_their_shards_and_a_trainer_that_comes_next_goes_on(
    cluster: RunCluster,
) -> None:
    await trained(cluster, 2, "sharded")
    assert cluster.numbers == [(4, 4)]
    for version in (1, 2, 3, 4):
        assert_published(cluster, version)


async def test_ranks_with_stores_of_their_own_serve_their_shards(cluster: RunCluster) -> None:
    await trained(cluster, 4, "own_stores")
    assert cluster.numbers == [(1, 1), (2, 1), (3, 2)]
    for version in (1, 2, 3):
        assert_published(cluster, version, root="fetched")


def assert_equal(found: dict[str, TensorBits], wanted: dict[str, TensorBits]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name].bits, tensor.bits, name)


async def test_the_first_rank_publishes_what_all_gather(cluster: RunCluster) -> None:
    await trained(cluster, 2, "gathered")
    assert cluster.numbers == [(1, 0), (2, 1)]
    for version in (1, 2):
        assert_published(cluster, version)


async def test_weights_that_do_not_fit_are_an_error_on_all_ranks_and_the_next_fit(
    cluster: RunCluster,
) -> None:
    await trained(cluster, 2, "unfit")
    assert cluster.numbers == [(1, 0)]
    assert_published(cluster, 1)
