"""A real host and its guest, each over two ranks of vLLM.

Both ranks of the guest give back KV memory under its grant, and compute as before. At last ranks
are killed: each engine ends whole, and nothing is left. The tests build on one another.
"""

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio
from balloon_guest import MIB, Guest, prompts_of, same_tokens_though_disturbed
from engine_specs import RANKED_GUEST, RANKED_HOST
from pool import EnginePool, Started

from executor import GrantMode, HostState
from tests.harness.waiting import until_async

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(RANKED_HOST, RANKED_GUEST),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

log = logging.getLogger(__name__)
GIB = 1 << 30
# vLLM's executor waits 5 s for its other ranks, then ends them; a guest's watchdog waits for none.
ENDED_S = 60.0
RANKS_ENDED_S = 5.0


@pytest.fixture(scope="module")
def host(engines: list[Started]) -> Started:
    return engines[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(engines: list[Started]) -> AsyncIterator[Guest]:
    async with aiohttp.ClientSession() as http:
        yield Guest(engines[1], http)


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


async def test_both_ranks_started_behind_the_gate(guest: Guest) -> None:
    log = guest.engine.spec.log.read_text()
    assert log.count("2 passes of the start waited") == 2, log[-4000:]


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
        most = guest.state().bytes_mapped - GIB
        guest.node.kv_granule_cap = 3
        took.append(await guest.until(lambda now, most=most: now.bytes_mapped <= most))
        guest.node.kv_granule_cap = 0
    log.info("1 GiB of a guest of two ranks: %s ms", [round(s * 1e3) for s in sorted(took)])


def state_of(host: Started) -> HostState:
    return host.control.host.peek() or HostState()


async def ask(host: Started, http: aiohttp.ClientSession, tokens: int) -> list[int]:
    """Keep the host busy, and return its tokens; it may die meanwhile."""
    body = {
        "model": host.spec.name,
        "prompt": [1, 2, 3],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    try:
        async with http.post(f"{host.url}/v1/completions", json=body) as answer:
            found: list[int] = (await answer.json())["choices"][0]["token_ids"]
            return found
    except (aiohttp.ClientError, KeyError):
        return []


def segments() -> set[str]:
    """Return the names of shared memory as Python's multiprocessing makes it, for vLLM's queues."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


async def killed(engine: Started, rank: int) -> tuple[float, float]:
    """Kill a rank; return the seconds until all ranks, and until the whole engine, are gone."""
    family = psutil.Process(engine.pid).children(recursive=True)
    ranks = [process for process in family if "Worker_TP" in process.name()]
    (victim,) = (process for process in ranks if f"Worker_TP{rank}" in process.name())
    engine.spend("a rank of it is killed")
    began_s = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    await until_async(lambda: not any(map(running, ranks)), ENDED_S, "no rank is there")
    ranks_s = time.monotonic() - began_s
    await until_async(lambda: engine.ended, ENDED_S, "the engine ends")
    await until_async(lambda: not any(map(running, family)), ENDED_S, "all processes end")
    return ranks_s, time.monotonic() - began_s


def running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_host_lends_memory_of_both_ranks(host: Started) -> None:
    await until_async(lambda: state_of(host).bytes_lent > 16 << 20, 30, "it lends")
    state = state_of(host)
    log.info("%d MiB of %d granules lent", state.bytes_lent >> 20, state.granules_lent)
    assert state.idle


async def test_a_host_whose_rank_is_killed_is_gone_and_its_guest_waits(
    host: Started, guest: Guest
) -> None:
    guest.engine.spend("its host is gone, and its turns wait")
    shared = segments()
    async with aiohttp.ClientSession() as http:
        asking = [asyncio.create_task(ask(host, http, 400)) for _ in range(4)]
        await until_async(lambda: state_of(host).running > 0, 30, "it is busy")
        turns = [
            asyncio.create_task(guest.turn(prompt, 200))
            for prompt in prompts_of(random.Random(5), 4)
        ]
        _, took_s = await killed(host, rank=1)
        await asyncio.gather(*asking)
    log.info("host gone %.1f s after its rank", took_s)
    await guest.until(lambda now: now.waiting + now.running > 0)
    await guest.until(lambda now: now.gate_reason == "no_host")
    tokens = guest.state().tokens_total
    await asyncio.sleep(0.5)
    assert guest.state().tokens_total == tokens
    assert not segments() - shared
    for turn in turns:
        turn.cancel()


async def test_a_guest_whose_rank_is_killed_ends_whole(guest: Guest) -> None:
    ranks_s, took_s = await killed(guest.engine, rank=0)
    log.info("ranks gone after %.2f s, the guest after %.1f s", ranks_s, took_s)
    assert ranks_s < RANKS_ENDED_S
    reports = [
        process.pid
        for process in psutil.process_iter()
        if "rose-rank-" in _maps(process.pid) and process.pid != os.getpid()
    ]
    assert not reports


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("victim", "rank", "moment"),
    [
        ("guest", 1, "it gives pages back beside a busy host"),
        ("guest", 0, "it is inside a step"),
        ("host", 0, "it lends, and its guest has a turn"),
    ],
)
async def test_wherever_a_rank_is_killed_nothing_is_lost(
    engine_pool: EnginePool, host: Started, guest: Guest, victim: str, rank: int, moment: str
) -> None:
    """The other engine says what it says undisturbed, and so does the one that starts anew."""
    for engine in (host, guest.engine):
        if engine.ended:
            await asyncio.to_thread(engine_pool.renew, engine)
    await until_async(lambda: state_of(host).bytes_lent > 16 << 20, 60, "it lends")
    lent = state_of(host).granules_lent
    shared = segments()
    async with aiohttp.ClientSession() as http:
        said, alone = await ask(host, http, 300), await guest.turn([1, 2, 3], 200)
        turn = asyncio.create_task(guest.turn([1, 2, 3], 200))
        await guest.until(lambda now: now.in_step)
        asked = []
        if moment.endswith("busy host"):
            asked = [asyncio.create_task(ask(host, http, 300)) for _ in range(4)]
            await until_async(lambda: state_of(host).running > 0, 30, "it is busy")
            guest.node.hold(3)
        await killed(host if victim == "host" else guest.engine, rank)
        assert not segments() - shared
        if victim == "host":
            tokens = guest.state().tokens_total
            await asyncio.sleep(0.5)
            assert guest.state().tokens_total == tokens, "no step without its host"
        else:
            assert await asyncio.gather(*asked) == [said] * len(asked)
            turn.cancel()
        await asyncio.to_thread(engine_pool.renew, host if victim == "host" else guest.engine)
        if victim == "host":
            assert await turn == alone
        assert (await ask(host, http, 300), await guest.turn([1, 2, 3], 200)) == (said, alone)
    await until_async(lambda: state_of(host).granules_lent >= lent, 60, "it lends as much again")


def _maps(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            return maps.read()
    except OSError:
        return ""
