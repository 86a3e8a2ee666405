"""The whole ladder against a real guest, whose sleep route answers 200 and gives nothing back."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from standin_node import StandInNode
from tiny_model import save_tiny_model

from executor import ControlPage, GrantMode
from executor.reclaim import Finished, Outcome, Rung
from rose.engines import EngineProcess, EngineRole, EngineSpec
from rose.eventlog import EventLog
from rose.group_memory import group_bytes
from rose.node.memory import HostMemory
from rose.node.reclaimer import Guest, Reclaimer
from rose.node.replica_client import ReplicaClient
from rose.ports import free_port

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

log = logging.getLogger(__name__)
MIB = 1 << 20
KV_BYTES = 512 * MIB


@dataclass
class Rig:
    """A guest, and what its node would have for a reclaim."""

    page: ControlPage
    node: StandInNode
    engine: EngineProcess
    client: ReplicaClient
    events: EventLog
    killed: asyncio.Task[None] | None = None

    @property
    def memory(self) -> int | None:
        return group_bytes(self.engine.process.pid)

    def hold(self, cap: int) -> None:
        self.node.mode, self.node.kv_granule_cap = GrantMode.FREEZE, cap

    def free(self) -> None:
        self.node.mode, self.node.kv_granule_cap = GrantMode.RUN, 0

    def kill(self, _: str) -> None:
        self.killed = asyncio.create_task(self.engine.process.kill())

    def reclaimer(self, *, sleeps: bool) -> Reclaimer:
        guest = Guest(
            "guest-0",
            lambda: HostMemory(lambda: self.engine.process.pid),
            self.page.guest.peek,
            self.hold,
            self.free,
            self.client.sleep if sleeps else None,
            self.kill,
        )
        return Reclaimer(guest, self.events)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    root: Path = tmp_path_factory.mktemp("ladder")
    save_tiny_model(root / "model", dtype="float32")
    port = free_port()
    page = ControlPage.create(root / "page")
    node = StandInNode(page)
    node.start()
    spec = EngineSpec(
        name="guest-0",
        role=EngineRole.GUEST,
        model_dir=root / "model",
        port=port,
        log=root / "guest.log",
        dtype="float32",
        kv_bytes=KV_BYTES,
        control_page=page.path,
        extra_args=("--skip-tokenizer-init",),
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    engine = await EngineProcess.start(spec)
    events = EventLog(root, "node")
    try:
        await engine.wait_healthy(240)
        async with aiohttp.ClientSession() as http:
            yield Rig(page, node, engine, ReplicaClient(http, spec.url), events)
    finally:
        await engine.stop()
        node.stop()
        page.close()
        events.close()


def told(finished: Finished) -> dict[Rung, Outcome]:
    for rung in finished.rungs:
        log.info(
            "%s: %s, %d MiB gone, %d MiB claimed, %.0f ms %s",
            *(rung.rung.name, rung.outcome.value, rung.freed_bytes // MIB),
            *(rung.claimed_bytes // MIB, rung.took_ns / 1e6, rung.why),
        )
    log.info(
        "%d MiB wanted, %d MiB gone after %.0f ms",
        *(finished.wanted_bytes // MIB, finished.freed_bytes // MIB, finished.took_ns / 1e6),
    )
    return {rung.rung: rung.outcome for rung in finished.rungs}


async def test_a_part_of_its_kv_comes_back_and_the_guest_lives_on(rig: Rig) -> None:
    before = rig.memory
    finished = await rig.reclaimer(sleeps=False).reclaim(200 * MIB, 5.0, "test")
    after = rig.memory
    assert told(finished) == {Rung.FREEZE: Outcome.TOO_LITTLE, Rung.BALLOON: Outcome.FREED}
    assert finished.enough
    assert finished.in_time
    assert before is not None
    assert after is not None
    assert 200 * MIB <= before - after < 260 * MIB
    state = await rig.client.state()
    assert state["replica_id"] == "guest-0"


async def test_sleep_reported_success_but_memory_stayed_held(rig: Rig) -> None:
    """vLLM 0.32 on CPU answers its sleep route with 200 and does nothing."""
    wanted = (rig.memory or 0) - 100 * MIB
    finished = await rig.reclaimer(sleeps=True).reclaim(wanted, 10.0, "test")
    outcomes = told(finished)
    assert outcomes[Rung.RELEASE_KV] is Outcome.TOO_LITTLE
    assert outcomes[Rung.SLEEP] is Outcome.HELD
    assert outcomes[Rung.KILL] is Outcome.FREED
    assert finished.enough
    assert finished.in_time
    assert rig.killed is not None
    await rig.killed
    assert rig.memory == 0
