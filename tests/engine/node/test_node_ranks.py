"""A node starts engines of two ranks by its file: they take versions, answer turns, end whole."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tiny_model import VOCABULARY, save_tiny_model

from rose.cli.main import main as rose
from rose.node import NodeDaemon
from rose.process.child import group_alive
from rose.process.procfs import group_members
from rose.rpc import rose_pb2 as pb
from tests.harness.waiting import until_async
from tests.unit.node import node_bench
from tests.unit.node.node_bench import NodeBench
from weight_transfer.format.checkpoint import read_model_dir
from weight_transfer.format.tensors import TensorBits, tensor_bits, tensor_of

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]

START_S = 400.0
GONE_S = 5.0
FILE = {
    "kv_bytes": 32 << 20,
    "max_model_len": 128,
    "max_sequences": 8,
    "start_timeout_s": START_S,
    "warm_up_s": START_S,
    "engine_args": ["--skip-tokenizer-init"],
    "cores": sorted(os.sched_getaffinity(0))[:2],
}
PROMPT = [(7 * k + 3) % VOCABULARY for k in range(40)]


def changed(weights: dict[str, TensorBits], seed: int) -> dict[str, TensorBits]:
    import torch

    torch.manual_seed(seed)
    tensors = {name: tensor_of(bits) for name, bits in weights.items()}
    return {
        name: tensor_bits(name, tensor + 0.05 * torch.randn_like(tensor))
        for name, tensor in tensors.items()
    }


class RanksBench(NodeBench):
    """A node whose engines are real, with the checkpoint that they start with."""

    def __init__(self, folder: Path, kind: str, **replica: object) -> None:
        super().__init__(folder, kind, **FILE | replica)
        save_tiny_model(folder / "tiny", dtype="bfloat16")
        self.settings["replicas"][0]["model_dir"] = str(folder / "tiny")
        self.weights = read_model_dir(folder / "tiny")
        self.version = 0

    async def next(self) -> pb.Replica:
        """Publish the next version, and wait until the replica has proven it."""
        before, self.weights = self.weights, changed(self.weights, self.version)
        self.version += 1
        await self.publisher.publish(self.version, self.version - 1, before, self.weights)
        return await self.until(
            f"version {self.version}", lambda row: row.leased and row.policy_version == self.version
        )

    async def turn(self, name: str) -> tuple[list[int], set[int]]:
        """Return the tokens of a greedy turn, and the versions that they were sampled with."""
        row = await self.row()
        assert row is not None
        sampling = {"max_tokens": 8, "temperature": 0.0}
        body = {"request_id": name, "token_ids": PROMPT, "sampling": sampling}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{row.url}/rose/v1/generate", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            lines = [json.loads(line) async for line in answer.content]
        spans = [line for line in lines if line.get("token_ids")]
        tokens = [token for line in spans for token in line["token_ids"]]
        return tokens, {line["version"] for line in spans}

    def group(self, node: NodeDaemon) -> int:
        pid = node._replicas["r0"].supervisor.pid
        assert pid is not None
        return pid


def names(group: int) -> list[str]:
    """Names of the group's ranks and engine cores, as the kernel cuts them."""
    return sorted(stat.name for _, stat in group_members(group) if stat.name.startswith("VLLM::"))


@asynccontextmanager
async def running(
    folder: Path, kind: str, **replica: object
) -> AsyncIterator[tuple[RanksBench, int]]:
    """A node whose replica has taken two versions, and the replica's process group."""
    bench = RanksBench(folder, kind, **replica)
    await bench.start()
    try:
        async with bench.running() as node:
            await versions_are_taken(bench)
            yield bench, bench.group(node)
    finally:
        await bench.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_bench, "PATIENCE_S", START_S)


async def versions_are_taken(bench: RanksBench) -> None:
    """Two versions, each sampled from and each another policy."""
    await bench.until("healthy and leased", lambda row: row.healthy and row.leased)
    answers = [(await bench.turn("turn-0"))[0]]
    for version in (1, 2):
        await bench.next()
        tokens, sampled = await bench.turn(f"turn-{version}")
        assert sampled == {version}
        answers.append(tokens)
    assert len({tuple(tokens) for tokens in answers}) == 3


CORE, RANK = "VLLM::EngineCor", "VLLM::Worker_TP"


async def test_a_dedicated_replica_of_two_ranks_follows_its_job_and_dies_with_any_rank(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "dedicated", tensor_parallel=2) as (bench, group):
        assert names(group) == [CORE, RANK, RANK]
        [rank, _] = [pid for pid, stat in group_members(group) if stat.name == RANK]
        os.kill(rank, signal.SIGKILL)
        await until_async(lambda: not group_alive(group), GONE_S * 2, "nothing of it is left")
        # The engine is started anew, and ends whole with its node.
        again = await bench.until_noted("engine_started", 2)
    await until_async(lambda: not group_alive(again["pid"]), GONE_S, "it ends with its node")


async def test_the_kill_switch_ends_a_guest_of_two_ranks_whole(tmp_path: Path) -> None:
    async with running(tmp_path, "guest", tensor_parallel=2) as (bench, group):
        assert names(group) == [CORE, RANK, RANK]
        # The daemon, which is in this process, does its part meanwhile.
        assert await asyncio.to_thread(rose, ["kill", str(bench.run_dir)]) == 0
        assert not group_alive(group)
        proved = await bench.until_noted("stop_proved")
        assert (proved["held_bytes"], proved["in_time"]) == (0, True)


async def test_versions_reach_every_copy_of_a_data_parallel_replica(tmp_path: Path) -> None:
    async with running(tmp_path, "dedicated", data_parallel=2) as (bench, group):
        assert names(group) == ["VLLM::DPCoordin", CORE, CORE]
        # vLLM gives turns to its copies by turns: all say the same, of the same version.
        answers = [await bench.turn(f"again-{number}") for number in range(4)]
        assert all(answer == answers[0] for answer in answers)
