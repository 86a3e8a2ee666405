"""A real guest over two ranks: both give back KV memory under its grant, and compute as before."""

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio
from balloon_guest import MIB, Guest, prompts_of, same_tokens_though_disturbed
from engine_specs import RANKED_GUEST
from pool import Started

from executor import GrantMode

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(RANKED_GUEST),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

log = logging.getLogger(__name__)
GIB = 1 << 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(engines: list[Started]) -> AsyncIterator[Guest]:
    async with aiohttp.ClientSession() as http:
        yield Guest(engines[0], http)


def ranks_of(guest: Guest) -> list[psutil.Process]:
    """Processes that map a report."""
    found = [
        process
        for process in guest.engine.core.children(recursive=True)
        if "memfd:rose-rank-" in Path(f"/proc/{process.pid}/maps").read_text()
    ]
    assert len(found) == 2
    return found


def resident(guest: Guest) -> list[int]:
    return [process.memory_info().rss for process in ranks_of(guest)]


async def test_both_ranks_give_back_what_the_page_says_and_get_it_again(guest: Guest) -> None:
    await asyncio.gather(*(guest.turn(prompt, 20) for prompt in prompts_of(random.Random(4), 4)))
    before, full = resident(guest), guest.state()
    assert RANKED_GUEST.kv_bytes - MIB < full.bytes_mapped <= RANKED_GUEST.kv_bytes
    guest.node.kv_granule_cap = 3
    took_s = await guest.until(lambda now: now.bytes_mapped <= full.bytes_mapped - GIB)
    state = guest.state()
    claimed = full.bytes_mapped - state.bytes_mapped
    assert state.granules_mapped == 3
    fell = [was - now for was, now in zip(before, resident(guest), strict=True)]
    fell_mib = [each // MIB for each in fell]
    log.info("%d MiB claimed, %s fell, %.0f ms", claimed // MIB, fell_mib, took_s * 1e3)
    assert all(abs(each - claimed) < 16 * MIB for each in fell), fell
    guest.node.kv_granule_cap = 0
    answers = await asyncio.gather(*(guest.turn(p, 100) for p in prompts_of(random.Random(1), 30)))
    assert all(reason == "length" for _, reason in answers)
    assert guest.state().bytes_mapped == full.bytes_mapped


async def test_a_frozen_guest_gives_back_and_computes_nothing(guest: Guest) -> None:
    prompts = prompts_of(random.Random(2), 8)
    alone = [await guest.turn(prompt, 120) for prompt in prompts[:2]]
    running = [asyncio.create_task(guest.turn(prompt, 120)) for prompt in prompts]
    await guest.until(lambda state: state.running == len(prompts))
    guest.node.mode = GrantMode.FREEZE
    await guest.until(lambda state: state.gate_reason == "frozen")
    tokens = guest.state().tokens_total
    guest.node.kv_granule_cap = 3
    took_s = await guest.until(lambda state: state.bytes_mapped < 16 * MIB)
    log.info("frozen guest of two ranks: %.0f ms", took_s * 1e3)
    assert guest.state().tokens_total == tokens
    guest.node.kv_granule_cap, guest.node.mode = 0, GrantMode.RUN
    answers = await asyncio.gather(*running)
    assert [answers[0], answers[1]] == alone


@pytest.mark.parametrize("seed", range(2))
async def test_greedy_output_is_that_of_an_undisturbed_guest(guest: Guest, seed: int) -> None:
    turns, moves = await same_tokens_though_disturbed(guest, seed)
    log.info("%d turns equal, %d moves", turns, moves)


async def test_a_gibibyte_comes_back_in_time(guest: Guest) -> None:
    """The page says so once both ranks did it; the first times are of fresh memory."""
    took = []
    for _ in range(int(os.environ.get("ROSE_TEST_SHRINKS", "6"))):
        await guest.turn([1, 2, 3], 20)
        await guest.until(lambda now: now.granules_mapped == now.granules_total)
        full = guest.state().bytes_mapped
        guest.node.kv_granule_cap = 3
        took.append(await guest.until(lambda now: now.bytes_mapped <= full - GIB))
        guest.node.kv_granule_cap = 0
    log.info("1 GiB of a guest of two ranks: %s ms", [round(s * 1e3) for s in sorted(took)])
