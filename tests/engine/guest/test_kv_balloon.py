"""A real guest in fp32 whose KV memory falls and grows under its grant."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from balloon_guest import MIB, Guest, prompts_of, same_tokens_though_disturbed
from engine_specs import GUEST, HOST
from pool import Started
from tiny_model import VOCABULARY
from vllm_versions import VERSIONS

from executor import GrantMode

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(HOST, GUEST, versions=VERSIONS),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

log = logging.getLogger(__name__)
GIB = 1 << 30
KV_BYTES = GUEST.kv_bytes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(engines: list[Started]) -> AsyncIterator[Guest]:
    async with aiohttp.ClientSession() as http:
        yield Guest(engines[1], http)


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
    # The call would wait for as long as the cap lasts.
    async with asyncio.timeout(30):
        tokens, reason = await guest.turn([n % VOCABULARY for n in range(300)], 10)
    assert (tokens, reason) == ([], "abort")
    guest.node.kv_granule_cap = 0
    await guest.until(lambda state: state.granules_mapped >= 1)


@pytest.mark.parametrize("seed", range(3))
async def test_greedy_output_is_that_of_an_undisturbed_guest(guest: Guest, seed: int) -> None:
    before = guest.state()
    turns, moves = await same_tokens_though_disturbed(guest, seed)
    held_back_s = (guest.state().yielded_ns - before.yielded_ns) / 1e9
    log.info("%d turns equal, %d moves, %.1f s held back", turns, moves, held_back_s)


async def test_a_gibibyte_comes_back_while_rollouts_run(guest: Guest) -> None:
    """Here most of the pool is idle; `make bench-kv` fills it with rollouts, and times this."""
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
    guest.node.kv_granule_cap = 0
    ends = [reason for _, reason in await asyncio.gather(*running)]
    assert set(ends) <= {"length", "abort"}
    assert state.granules_total == guest.state().granules_total
