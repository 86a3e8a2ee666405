"""The gateway over two real replicas in fp32: a turn that moves is the turn that stayed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tiny_model import VOCABULARY, save_tiny_model

from elastic_scheduler import ReplicaKind
from rose.client import RolloutClient, Sampling, Turn
from rose.engines.launch import EngineProcess
from rose.engines.spec import EngineRole, EngineSpec
from rose.gateway import Gateway, GatewaySettings, StaticReplica, static
from rose.ports import free_port

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]

START_S = 200.0
PATIENCE_S = 20.0
# By then the gateway has forgotten how slow the first batch was.
SETTLE_S = 2.0
TURNS = 8
OUTPUT_TOKENS = 400
MIDDLE_TOKENS = 60
PROMPTS = [[(7 * k + 5 * turn + 3) % VOCABULARY for k in range(50 + turn)] for turn in range(TURNS)]
GREEDY = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS)


@dataclass
class Replica:
    """A real engine, and the epochs of a node that does not exist here."""

    name: str
    engine: EngineProcess
    http: aiohttp.ClientSession
    epoch: int = 0

    async def command(self, path: str) -> dict[str, Any]:
        self.epoch += 1
        url = f"{self.engine.spec.url}/rose/v1/{path}"
        async with self.http.post(url, json={"epoch": self.epoch, "reason": "test"}) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.engine.process.pid, number)


@dataclass
class Fleet:
    """Two replicas and a gateway in front of them."""

    replicas: dict[str, Replica]
    url: str
    http: aiohttp.ClientSession
    expected: list[Turn] = field(default_factory=list)

    async def turns(self, label: str) -> list[Turn]:
        """All prompts at once."""
        async with RolloutClient(self.url, timeout_s=120) as client:
            return await asyncio.gather(
                *(
                    client.generate(
                        prompt, GREEDY, request_id=f"{label}-{k}", session_id=f"{label}-{k}"
                    )
                    for k, prompt in enumerate(PROMPTS)
                )
            )

    async def stats(self) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/rose/v1/stats") as answer:
            return dict(await answer.json())

    async def ready(self, replicas: int) -> None:
        """Wait until the gateway sends turns to so many replicas."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self.http.get(f"{self.url}/health") as answer:
                    if (await answer.json())["replicas"] == replicas:
                        return
                await asyncio.sleep(0.05)

    async def in_the_middle(self) -> Replica:
        """The replica with most turns, once it has made `MIDDLE_TOKENS` more for them."""
        before = (await self.stats())["tokens"]
        async with asyncio.timeout(PATIENCE_S):
            while True:
                stats = await self.stats()
                live = stats["live_turns"]
                name = max(live, key=live.__getitem__)
                made = stats["tokens"].get(name, 0) - before.get(name, 0)
                if live[name] and made >= MIDDLE_TOKENS:
                    return self.replicas[name]
                await asyncio.sleep(0.005)


def spec_of(name: str, root: Path) -> EngineSpec:
    port = free_port()
    return EngineSpec(
        name=name,
        role=EngineRole.DEDICATED,
        model_dir=root / "model",
        port=port,
        log=root / f"{name}.log",
        dtype="float32",
        stream_interval=4,
        extra_args=("--skip-tokenizer-init",),
        extra_env={"CUDA_VISIBLE_DEVICES": ""},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    root = tmp_path_factory.mktemp("gateway")
    save_tiny_model(root / "model", dtype="float32")
    engines: dict[str, EngineProcess] = {}
    patch = pytest.MonkeyPatch()
    # Else half of each turn would pass before the gateway sees a replica come back.
    patch.setattr(static, "POLL_S", 0.05)
    try:
        for name in ("left", "right"):
            engines[name] = await EngineProcess.start(spec_of(name, root))
        await asyncio.gather(*(engine.wait_healthy(START_S) for engine in engines.values()))
        rows = tuple(
            StaticReplica(name, ReplicaKind.DEDICATED, engine.spec.url, 32)
            for name, engine in engines.items()
        )
        settings = GatewaySettings(port=0, replicas=rows, max_attempts=24)
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as http, Gateway(settings) as gateway:
            replicas = {name: Replica(name, engine, http) for name, engine in engines.items()}
            fleet = Fleet(replicas, f"http://127.0.0.1:{gateway.port}", http)
            for replica in replicas.values():
                await replica.command("admit")
            await fleet.ready(2)
            # The first batch of an engine takes seconds: long enough to count as stalled.
            await fleet.turns("warm-up")
            await asyncio.sleep(SETTLE_S)
            fleet.expected = await fleet.turns("undisturbed")
            yield fleet
    finally:
        patch.undo()
        for engine in engines.values():
            await engine.stop()


def assert_same(turns: list[Turn], expected: list[Turn]) -> None:
    """Same tokens, logprobs as near as recomputing them leaves them, every token accounted for."""
    for turn, plain in zip(turns, expected, strict=True):
        assert turn.token_ids == plain.token_ids
        assert turn.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
        assert turn.versions == ((0, 0, OUTPUT_TOKENS),)
        assert (turn.segments[0][2], turn.segments[-1][3]) == (0, OUTPUT_TOKENS)
        assert all(a[3] == b[2] for a, b in pairwise(turn.segments))
        assert turn.finish_reason == "length"


async def test_undisturbed_turns_are_whole_and_use_both_replicas(fleet: Fleet) -> None:
    assert [turn.attempts for turn in fleet.expected] == [1] * TURNS
    assert all(len(turn.token_ids) == OUTPUT_TOKENS for turn in fleet.expected)
    # A degenerate model would make all the other tests empty.
    assert all(len(set(turn.token_ids[-100:])) > 8 for turn in fleet.expected)
    assert {turn.segments[0][0] for turn in fleet.expected} == set(fleet.replicas)


async def test_drains_in_the_middle_of_turns_change_no_token(fleet: Fleet) -> None:
    running = asyncio.create_task(fleet.turns("drained"))
    aborted = []
    for _ in range(3):
        replica = await fleet.in_the_middle()
        aborted.append((await replica.command("drain"))["aborted"])
        await asyncio.sleep(0.1)
        await replica.command("admit")
        await fleet.ready(2)
    turns = await running
    assert all(aborted), "every drain hit running turns"
    assert max(turn.attempts for turn in turns) >= 3
    assert any(len({segment[0] for segment in turn.segments}) == 2 for turn in turns)
    assert_same(turns, fleet.expected)


async def test_a_replica_that_hangs_loses_its_turns_to_the_other(fleet: Fleet) -> None:
    running = asyncio.create_task(fleet.turns("hung"))
    replica = await fleet.in_the_middle()
    replica.signal(signal.SIGSTOP)
    try:
        turns = await running
    finally:
        replica.signal(signal.SIGCONT)
    assert any(turn.attempts > 1 for turn in turns)
    assert replica.name not in {turn.segments[-1][0] for turn in turns}
    assert_same(turns, fleet.expected)


async def test_a_killed_replica_loses_no_token(fleet: Fleet) -> None:
    await fleet.ready(2)
    running = asyncio.create_task(fleet.turns("killed"))
    replica = await fleet.in_the_middle()
    replica.signal(signal.SIGKILL)
    turns = await running
    assert any(turn.attempts > 1 for turn in turns)
    assert_same(turns, fleet.expected)
    stats = await fleet.stats()
    assert stats["failed"] == 0
    assert stats["turns"] == 5 * TURNS
