"""A real SGLang guest, and a host, over two ranks: both move memory of both and compute as before.

The contract over two ranks is ROSE_TEST_SGLANG_RANKS=2.
"""

import asyncio
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from live_replica import Replica
from sglang_python import MISSING, PYTHON

from executor import ControlPage, GrantMode
from rose.engines import EngineRole
from tests.harness.waiting import until, until_async

sys.path.append(str(Path(__file__).parents[1] / "contract"))
from contract_engines import SGLANG
from contract_stage import host_stage
from guest_rig import Rig, client_of, gathered, started

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not PYTHON, reason=MISSING),
]

log = logging.getLogger(__name__)
MIB = 1 << 20
KV_BYTES = 1280 * MIB
"""Each rank has half, as it has half of the heads."""
HOST_KV_BYTES = 24 * MIB
TURN = 96


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    engine = replace(SGLANG, ranks=2)
    async with started(engine, tmp_path_factory.mktemp("ranks"), kv_bytes=KV_BYTES) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def replica(rig: Rig) -> AsyncIterator[Replica]:
    async with client_of(rig) as replica:
        yield replica


def ranks_of(rig: Rig) -> list[psutil.Process]:
    """Return the schedulers' processes, by rank; others that they fork have reports open, too."""
    found = {}
    for process in psutil.Process(rig.process.process.pid).children(recursive=True):
        _, titled, rank = "".join(process.cmdline()[:1]).partition("sglang::scheduler_TP")
        if titled:
            found.setdefault(int(rank), process)
    assert sorted(found) == [0, 1], found
    return [found[0], found[1]]


async def test_both_ranks_give_back_what_the_page_says(rig: Rig, replica: Replica) -> None:
    ranks = ranks_of(rig)
    took = []
    for _ in range(int(os.environ.get("ROSE_TEST_SHRINKS", "4"))):
        await gathered(replica, 4, 8, salt=f"{len(took)}")
        whole = rig.state
        before = [rank.memory_info().rss for rank in ranks]
        began_s = time.perf_counter()
        rig.node.kv_granule_cap = 3
        await rig.said(lambda now: now.bytes_mapped < 64 * MIB, "the rest went back")
        took.append(time.perf_counter() - began_s)
        claimed = whole.bytes_mapped - rig.state.bytes_mapped
        fell = [was - now.memory_info().rss for was, now in zip(before, ranks, strict=True)]
        # Pages that came back are there once they are touched, which little of them is here.
        if len(took) == 1:
            assert all(abs(each - claimed) < 24 * MIB for each in fell), (fell, claimed)
        rig.node.kv_granule_cap = 0
        await replica.lines([1, 2, 3], 2)
        await rig.said(lambda now: now.granules_mapped == now.granules_total, "it came back")
    log.info("%d MiB of each rank: %s ms", claimed // MIB, [round(s * 1e3) for s in took])


async def test_greedy_output_is_that_of_an_undisturbed_guest(rig: Rig, replica: Replica) -> None:
    expected = await gathered(replica, 6, TURN)
    rng = random.Random(1)
    for again in range(3):
        turns = asyncio.create_task(gathered(replica, 6, TURN, salt=f"again {again}"))
        while not turns.done():
            rig.node.mode = rng.choice([GrantMode.RUN, GrantMode.RUN, GrantMode.FREEZE])
            rig.node.token_budget = rng.choice([4, 64, 2048])
            rig.node.kv_granule_cap = rng.choice([0, 4, 8, 16])
            await asyncio.sleep(rng.uniform(0.02, 0.2))
        rig.node.reset()
        assert await turns == expected


async def test_a_guest_ends_whole_with_one_of_its_ranks(rig: Rig) -> None:
    ranks = ranks_of(rig)
    ranks[1].send_signal(signal.SIGKILL)
    began_s = time.perf_counter()
    await until_async(lambda: not any(map(_lives, ranks)), 10, "the other rank ends", 0.005)
    log.info("the other rank ended after %.0f ms", (time.perf_counter() - began_s) * 1e3)
    await until_async(lambda: rig.process.process.returncode is not None, 60, "SGLang ends")


def test_a_host_of_two_ranks_lends_of_both_and_generates_what_stock_sglang_does(
    tmp_path: Path,
) -> None:
    engine = replace(SGLANG, ranks=2)
    burst = [[(i * 5 + shift) % 90 for i in range(300)] for shift in range(16)]
    lending = {"ROSE_HOST_LEVEL": "lend", "ROSE_HOST_PREFIX_COLD_S": "0"}
    with ControlPage.create(tmp_path / "page") as page, host_stage(engine, tmp_path) as stage:
        stock = stage.start("stock", EngineRole.STOCK, kv_bytes=HOST_KV_BYTES)
        host = stage.start(
            "host",
            EngineRole.HOST,
            kv_bytes=HOST_KV_BYTES,
            control_page=page.path,
            extra_env=lending,
        )
        stock.wait()
        host.wait()
        expected = stock.burst(burst, 100, "stock")
        stock.kill()

        def lent() -> int:
            state = page.host.peek()
            return 0 if state is None or not state.bytes_lent else state.granules_lent

        until(lambda: lent() > 0, 60.0, "it lends")
        before, least, ended = lent(), [lent()], threading.Event()

        def watch() -> None:
            while not ended.wait(0.002):
                least.append(lent())

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            for again in range(3):
                assert host.burst(burst, 100, f"host-{again}") == expected
        finally:
            ended.set()
            watching.join()
        log.info("granules lent: %d at most, %d at least", max(least), min(least))
        assert min(least) < before, "it took some back"
        until(lambda: lent() >= before - 1, 30.0, "it lends again")
        assert "not lent" not in host.said


def _lives(rank: psutil.Process) -> bool:
    return rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE
