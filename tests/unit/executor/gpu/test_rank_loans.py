"""A host of two ranks lends GPU pages to a guest of two ranks: a socket and a loan on each GPU."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_host_cases import device_caches
from kv_cases import BLOCK_TOKENS, WIDE, engine_of, kv_config, manager_of

from executor import Grant
from executor.cuda import kv_memory
from executor.cuda.kv_memory import page_source, reserve_kv
from executor.engine_settings import GUEST, HOST, LEND, EngineSettings
from executor.errors import LoanError
from executor.guest.kv_balloon import GuestKv
from executor.host.kv_lender import HostLender
from executor.kv.lending import LendingLimits
from executor.kv.rank_pages import RankPager, RankPages
from executor.kv.shrink_plan import KvGroup
from executor.vllm.host.kv_lender import CudaLendingPool, SkipPolicy
from executor.vllm.kv_backing import kv_pages
from executor.vllm.kv_block_pool import BalloonedPool
from tests.fakes.cuda.driver import PAGE, StandInDevice, StandInDriver

RANKS, BLOCKS, GRANULES = 2, 32, 16
RESERVE = 4
# Pages of each GPU beside the host's, the alias pages and that of the window.
OWN_PAGES = (2, 5)


def settings_of(role: str, path: Path) -> EngineSettings:
    return EngineSettings(role, "", 0.0, 0.0, 2.0, level=LEND, page_socket=str(path))


class ReservedRanks:
    """An engine's ranks, each with a reservation on a GPU, in this process."""

    def __init__(self, role: str, path: Path, devices: list[StandInDevice], pid: int) -> None:
        config = kv_config(BLOCKS, WIDE, on_gpu=True)
        self.manager = manager_of(config)
        self.reservations, self.pagers = [], []
        self.drivers = [StandInDriver(device) for device in devices]
        for rank, driver in enumerate(self.drivers):
            driver._next_address += (rank + 2 * (role == GUEST)) << 36
            size = config.kv_cache_tensors[0].size
            reservation = reserve_kv(settings_of(role, path), driver, size, RANKS)
            self.reservations.append(reservation)
            engine = engine_of(device_caches(config, reservation.address))
            pages, granules = kv_pages(engine, config)
            self.pagers.append(RankPager(pages, granules, rank, RANKS))
        self.pages = RankPages.of_processes([pid], RANKS, BLOCKS)

    def step(self) -> None:
        operations = self.pages.drain()
        for pager in self.pagers:
            pager.carry_out(operations)
        self.pages.poll()


class Pair:
    """A host and its guest; `now_ns` passes by a second a turn."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gc.collect()  # Reports of an earlier test, in this process, are not to be found.
        self.devices = [StandInDevice((3 + GRANULES + own) * PAGE) for own in OWN_PAGES]
        self.host = ReservedRanks(HOST, path, self.devices, os.getpid())
        # The guest's reports are those of another process; a thread has the same files open.
        monkeypatch.setattr(os, "getpid", threading.get_native_id)
        self.now_ns = 1

        def make_guest() -> None:
            self.guest = ReservedRanks(GUEST, path, self.devices, threading.get_native_id())

        other = threading.Thread(target=make_guest)
        other.start()
        other.join()
        clock = {"clock_ns": lambda: self.now_ns}
        pool = CudaLendingPool(
            self.host.manager.block_pool, self.host.pages.granules, self.host.pages
        )
        groups = [KvGroup(BLOCK_TOKENS)]
        hold = SkipPolicy(groups, 0, 512)
        limits = LendingLimits(RESERVE / GRANULES)
        self.lender = HostLender(pool, limits, groups, hold, **clock)
        balloon = BalloonedPool(
            self.guest.manager.block_pool, self.guest.pages.granules, self.guest.pages
        )
        self.kv = GuestKv(balloon, list, lambda _: None, **clock)

    def turn(self, tokens: int = 0) -> None:
        self.now_ns += 10**9
        self.lender.step(tokens, 1 if tokens else 0)
        self.host.step()
        live = {"heartbeat_ns": self.now_ns, "expiry_ns": self.now_ns + 10**9}
        self.kv.fit(Grant(**live))
        self.guest.step()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(kv_memory, "HEADROOM_BYTES", 0)
    made = Pair(tmp_path / "pages", monkeypatch)
    yield made
    for reservation in (*made.guest.reservations, *made.host.reservations):
        reservation.close()
    assert [device.used_bytes for device in made.devices] == [0, 0]


def test_each_gpu_has_a_socket_and_both_lend_and_take_back(pair: Pair, tmp_path: Path) -> None:
    sockets = sorted(path.name for path in tmp_path.iterdir())
    assert sockets == sorted(f"pages.{device.uuid[-4:].hex()}" for device in pair.devices)
    pair.guest.step()
    begins = pair.kv.mapped.granules_mapped
    assert begins == min(OWN_PAGES), "what the rank with the least found"
    for _ in range(60):
        pair.turn()
    lent = GRANULES - RESERVE - 1  # That of the null block stays.
    assert (pair.lender.lent.granules_lent, pair.lender.lent.bytes_lent) == (lent, lent * PAGE)
    assert pair.kv.mapped.granules_mapped == begins + lent
    sources: list[Any] = [reservation.source for reservation in pair.guest.reservations]
    assert all(source.borrowed >= lent - OWN_PAGES[1] for source in sources)
    for _ in range(60):
        pair.turn(tokens=BLOCKS * BLOCK_TOKENS)
    assert pair.lender.lent.granules_lent == 0
    assert pair.host.manager.block_pool.get_num_free_blocks() == BLOCKS - 1
    assert [source.borrowed for source in sources] == [0, 0]
    assert pair.kv.mapped.granules_mapped == begins
    assert pair.host.pages.bytes_returned == 0


def test_a_guest_of_several_ranks_needs_a_lender_on_each_gpu(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    devices = [StandInDevice(64 * PAGE) for _ in range(2)]
    server = page_source(settings_of(HOST, path), StandInDriver(devices[0]), RANKS)
    guests = settings_of(GUEST, path)
    page_source(guests, StandInDriver(devices[0]), RANKS).close()
    page_source(guests, StandInDriver(devices[0])).close()  # a guest of one rank, on a part
    with pytest.raises(LoanError, match="start the host first"):
        page_source(guests, StandInDriver(devices[1]), RANKS)
    server.close()
