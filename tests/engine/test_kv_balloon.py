"""A real guest in fp32 whose KV memory falls and grows under its grant."""

import asyncio
import json
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio
from standin_node import StandInNode
from tiny_model import VOCABULARY, save_tiny_model
from vllm_versions import VERSIONS, run_by

from executor import ControlPage, GrantMode, GuestState
from rose.engines import EngineProcess, EngineRole, EngineSpec

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

log = logging.getLogger(__name__)
GIB = 1 << 30
MIB = 1 << 20
KV_BYTES = GIB + 256 * MIB
MAX_TOKENS = 60


@dataclass
class Guest:
    url: str
    page: ControlPage
    node: StandInNode
    core: psutil.Process
    http: aiohttp.ClientSession

    def state(self) -> GuestState:
        state = self.page.guest.read()
        assert state is not None
        return state

    def resident(self) -> int:
        """Resident bytes of the engine core, as the kernel counts them."""
        for line in Path(f"/proc/{self.core.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                return int(line.split()[1]) << 10
        raise AssertionError("no Rss in smaps_rollup")

    async def settled_resident(self) -> int:
        """The same, once a ready engine has prepared for weights, which it does in a thread."""
        before, calm = self.resident(), 0
        async with asyncio.timeout(60):
            while calm < 8:
                await asyncio.sleep(0.25)
                now = self.resident()
                before, calm = now, calm + 1 if abs(now - before) < MIB else 0
        return before

    async def until(self, holds: Callable[[GuestState], bool], within_s: float = 10.0) -> float:
        """Wait; returns the seconds it took."""
        began_s = time.monotonic()
        while not holds(self.state()):
            assert time.monotonic() - began_s < within_s, self.state()
            await asyncio.sleep(0.0005)
        return time.monotonic() - began_s

    async def turn(self, tokens: list[int], max_tokens: int) -> tuple[list[int], str]:
        body = {
            "request_id": "turn",
            "token_ids": tokens,
            "sampling": {"temperature": 0.0, "max_tokens": max_tokens},
        }
        async with self.http.post(f"{self.url}/rose/v1/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            lines = [json.loads(line) async for line in answer.content]
        assert lines[-1]["finish_reason"] != "error", lines[-1]
        return [t for line in lines for t in line.get("token_ids", [])], lines[-1]["finish_reason"]

    async def trajectory(self, prompt: list[int]) -> tuple[list[int], int]:
        """As a gateway does: what was handed back goes on from where it was. Returns the moves."""
        output: list[int] = []
        for moves in range(200):
            more, reason = await self.turn(prompt + output, MAX_TOKENS - len(output))
            output += more
            if reason == "length":
                return output, moves
            assert reason == "abort"
            await asyncio.sleep(0.05)
        raise AssertionError("handed back without end")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=VERSIONS)
async def guest(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guest]:
    root = tmp_path_factory.mktemp("balloon")
    save_tiny_model(root / "model", dtype="float32")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
        **run_by(request.param, root),
    )
    engine = await EngineProcess.start(spec)
    try:
        await engine.wait_healthy(240)
        family = psutil.Process(engine.process.pid).children(recursive=True)
        core = max(family, key=lambda process: process.memory_info().rss)
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{spec.url}/rose/v1/admit", json={"epoch": 1}) as answer:
                assert answer.status == 200
            yield Guest(spec.url, page, node, core, http)
    finally:
        await engine.stop()
        node.stop()
        page.close()


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    shared = [rng.randrange(VOCABULARY) for _ in range(64)]
    return [
        (shared if rng.random() < 0.5 else [])
        + [rng.randrange(VOCABULARY) for _ in range(rng.randint(20, 150))]
        for _ in range(count)
    ]


async def test_an_idle_guest_returns_the_memory_it_claims_and_grows_back(guest: Guest) -> None:
    resident = await guest.settled_resident()
    full = guest.state()
    whole = full.bytes_mapped
    assert KV_BYTES - MIB < whole <= KV_BYTES
    assert full.granules_mapped == full.granules_total > 100
    kept = full.granules_total * 256 // 1280 - 2
    guest.node.kv_granule_cap = kept
    took_s = await guest.until(lambda state: state.granules_mapped == kept)
    await guest.until(lambda state: state.bytes_mapped <= whole - GIB)
    claimed = whole - guest.state().bytes_mapped
    fell = resident - guest.resident()
    log.info(
        "idle guest: %d MiB claimed, %d MiB fell, %.0f ms", claimed >> 20, fell >> 20, took_s * 1e3
    )
    assert claimed >= GIB
    assert abs(fell - claimed) < 8 * MIB
    # Fewer than the turns that follow need: they take what comes back.
    guest.node.kv_granule_cap = 16
    await guest.until(lambda state: state.granules_mapped == 16)
    small = guest.resident()
    guest.node.kv_granule_cap = 0
    answers = await asyncio.gather(*(guest.turn(p, 200) for p in prompts_of(random.Random(1), 60)))
    assert all(reason == "length" for _, reason in answers)
    grown = guest.state()
    assert (grown.bytes_mapped, grown.granules_mapped) == (whole, full.granules_total)
    assert guest.resident() > small + 40 * MIB, "pages come back when they are used"


async def test_a_frozen_guest_returns_memory_of_rollouts_that_wait(guest: Guest) -> None:
    prompts = prompts_of(random.Random(2), 8)
    alone = [await guest.turn(prompt, 200) for prompt in prompts[:2]]
    running = [asyncio.create_task(guest.turn(prompt, 200)) for prompt in prompts]
    await guest.until(lambda state: state.running == len(prompts))
    guest.node.mode = GrantMode.FREEZE
    await guest.until(lambda state: state.gate_reason == "frozen")
    tokens = guest.state().tokens_total
    guest.node.kv_granule_cap = 3
    took_s = await guest.until(lambda state: state.granules_mapped == 3)
    log.info("frozen guest: all but 3 granules back after %.0f ms", took_s * 1e3)
    state = guest.state()
    assert state.tokens_total == tokens, "no step came between"
    assert state.bytes_mapped < 8 * MIB
    guest.node.kv_granule_cap, guest.node.mode = 0, GrantMode.RUN
    answers = await asyncio.gather(*running)
    assert [answers[0], answers[1]] == alone


async def test_a_turn_that_cannot_fit_is_handed_back_at_once(guest: Guest) -> None:
    guest.node.kv_granule_cap = 1
    await guest.until(lambda state: state.granules_mapped == 1)
    began_s = time.monotonic()
    tokens, reason = await guest.turn([n % VOCABULARY for n in range(300)], 10)
    assert (tokens, reason) == ([], "abort")
    assert time.monotonic() - began_s < 2
    guest.node.kv_granule_cap = 0
    await guest.until(lambda state: state.granules_mapped >= 1)


async def disturb(guest: Guest, rng: random.Random) -> None:
    modes = [GrantMode.RUN, GrantMode.RUN, GrantMode.RUN, GrantMode.FREEZE, GrantMode.THROTTLE]
    total = guest.state().granules_total
    while True:
        guest.node.mode = rng.choice(modes)
        guest.node.token_budget = rng.choice([4, 64, 2048])
        guest.node.kv_granule_cap = rng.choice([0, 1, 2, 4, 6, 8, 12, total // 2])
        await asyncio.sleep(rng.uniform(0.02, 0.25))


@pytest.mark.parametrize("seed", range(3))
async def test_greedy_output_is_that_of_an_undisturbed_guest(guest: Guest, seed: int) -> None:
    rng = random.Random(seed)
    prompts = prompts_of(rng, 16)
    undisturbed = [(await guest.turn(prompt, MAX_TOKENS))[0] for prompt in prompts]
    before = guest.state()
    disturbing = asyncio.create_task(disturb(guest, rng))
    results = await asyncio.gather(*(guest.trajectory(prompt) for prompt in prompts))
    disturbing.cancel()
    guest.node.mode, guest.node.kv_granule_cap = GrantMode.RUN, 0
    guest.node.token_budget = 2048
    log.info(
        "%d turns equal, %d moves, %.1f s held back",
        *(len(prompts), sum(moves for _, moves in results)),
        (guest.state().yielded_ns - before.yielded_ns) / 1e9,
    )
    assert [output for output, _ in results] == undisturbed


async def test_a_gibibyte_of_running_rollouts_memory_comes_back_fast(guest: Guest) -> None:
    """Here most of the pool is idle; `make bench-kv` fills the gibibyte with rollouts."""
    running = [
        asyncio.create_task(guest.turn(prompt, 300)) for prompt in prompts_of(random.Random(9), 30)
    ]
    await guest.until(lambda now: now.running == len(running))
    await guest.until(lambda now: now.granules_mapped == now.granules_total)
    state = guest.state()
    guest.node.kv_granule_cap = 3
    took_s = await guest.until(lambda now: now.bytes_mapped <= state.bytes_mapped - GIB)
    held = state.bytes_mapped - guest.state().bytes_mapped
    log.info("running guest: %d MiB returned after %.0f ms", held >> 20, took_s * 1e3)
    assert held > GIB
    assert took_s < 2
    guest.node.kv_granule_cap = 0
    ends = [reason for _, reason in await asyncio.gather(*running)]
    assert set(ends) <= {"length", "abort"}
    assert state.granules_total == guest.state().granules_total
