"""A guest or dedicated replica of any engine beside a stand-in for its node, for contract tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from contract_engines import ContractEngine
from live_replica import Replica
from policy_versions import PolicyVersions
from standin_node import StandInNode
from tiny_model import save_tiny_model

from executor import ControlPage, GrantMode, GuestState
from rose.addresses import free_port
from rose.engines import EngineKind, EngineProcess, EngineRole, EngineSpec
from tests.harness.waiting import until, until_async

START_S = 240.0
KV_BYTES = 96 << 20
LENGTH = 512


@dataclass
class Rig:
    """One replica as a contract test sees it."""

    spec: EngineSpec
    control: ControlPage
    node: StandInNode
    versions: PolicyVersions
    process: EngineProcess
    epochs: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def headers(self) -> dict[str, str]:
        return self.process.headers

    @property
    def state(self) -> GuestState:
        """The last whole one: on a busy machine a guest may be held in the middle of a write."""
        seen: list[GuestState | None] = []

        def whole() -> bool:
            seen.append(self.control.guest.peek())
            return seen[-1] is not None

        until(whole, 10, "the guest's section is whole")
        state = seen[-1]
        assert state is not None
        return state

    async def said(self, what: Callable[[GuestState], object], why: str) -> GuestState:
        """Wait until the guest says so on its page."""
        await until_async(lambda: bool(what(self.state)), 30, why, 0.005)
        return self.state

    async def host_runs(self, requests: int) -> None:
        """Have the host say that so many run; returns once it is on the page."""
        self.node.host_running = requests

        def told() -> bool:
            state = self.control.host.peek()
            return state is not None and state.running == requests

        await until_async(told, 10, "the page has it", 0.005)

    async def grants(self, **given: int) -> None:
        """Grant so much; returns once it is on the page."""
        for name, value in given.items():
            setattr(self.node, name, value)

        def told() -> bool:
            grant = self.control.grant.peek()
            return grant is not None and all(getattr(grant, n) == v for n, v in given.items())

        await until_async(told, 10, "the page has it", 0.005)

    async def freeze(self) -> None:
        """Freeze the guest; returns once it yields."""
        self.node.mode = GrantMode.FREEZE
        await self.said(lambda state: state.gate_reason == "frozen", "the guest yields")


@asynccontextmanager
async def started(
    engine: ContractEngine, folder: Path, role: EngineRole = EngineRole.GUEST, **given: Any
) -> AsyncIterator[Rig]:
    """Start a replica that takes signed versions, of the model in `folder` or of a tiny one; it is
    warm."""
    if not (folder / "model").exists():
        save_tiny_model(folder / "model", dtype="float32")
    weights = folder / "weights"
    versions = PolicyVersions(weights, folder / "model")
    page = ControlPage.create(folder / "page")
    node = StandInNode(page)
    node.start()
    guest = role is EngineRole.GUEST
    given = {"kv_bytes": KV_BYTES, "max_model_len": LENGTH, "max_num_seqs": 16} | given
    if engine.kind is EngineKind.VLLM:
        given["extra_args"] = ("--scheduling-policy=priority", *given.get("extra_args", ()))
    spec = engine.spec(
        folder,
        role.value,
        role,
        free_port(),
        control_page=page.path if guest else None,
        orphan_s=60.0,
        verify_key=versions.key.verify_key.hex,
        weights_dir=weights,
        warm_up_s=120.0,
        **given,
    )
    process = await EngineProcess.start(spec)
    try:
        await process.wait_healthy(START_S)
        yield Rig(spec, page, node, versions, process)
    finally:
        await process.stop()
        node.stop()
        page.close()


@asynccontextmanager
async def client_of(rig: Rig) -> AsyncIterator[Replica]:
    """A client that has a lease; afterwards everything is granted again."""
    # Publishing blocks this process for longer than the server keeps an idle connection.
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        replica = Replica(rig, http)
        rig.node.reset()
        await replica.admit()
        yield replica
        rig.node.reset()


async def gathered(replica: Replica, turns: int, tokens: int, **how: Any) -> list[list[int]]:
    """Tokens of turns of different prompts at once."""
    from live_replica import tokens_of

    prompts = [[(13 * turn + 7 * k) % 90 for k in range(48)] for turn in range(turns)]
    lines = await asyncio.gather(*(replica.lines(prompt, tokens, **how) for prompt in prompts))
    return [tokens_of(each) for each in lines]
