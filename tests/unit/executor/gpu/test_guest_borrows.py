"""A guest on pages that its host lent: it grows on them, and gives just these back when asked."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_host_cases import device_caches
from kv_cases import WIDE, engine_of, kv_config, manager_of

from executor import Grant
from executor.cuda import kv_memory as source_module
from executor.cuda.kv_memory import page_source, reserve_kv
from executor.cuda.page_pool import PageClient, PagePool
from executor.cuda.page_server import PageServer
from executor.engine_settings import GUEST, HOST, LEND, OBSERVE, EngineSettings
from executor.errors import DeviceError, DeviceMemoryShort, LoanError
from executor.guest.kv_balloon import GuestKv
from executor.kv.shrink_plan import Rollout
from executor.vllm.kv_backing import kv_pages
from executor.vllm.kv_block_pool import BalloonedPool
from tests.fakes.cuda.driver import PAGE, StandInDevice, StandInDriver, scripted

BLOCKS, GRANULES, LENT_PAGES, OWN_PAGES = 32, 16, 10, 6
"""A granule is two blocks, and a page."""
NO_HEADROOM = 0


def settings_of(role: str, path: Path | str, level: str = LEND) -> EngineSettings:
    return EngineSettings(role, "", 0.0, 0.0, 2.0, level=level, page_socket=str(path))


class BorrowingGuest:
    """The balloon of a guest under a grant without a cap, and a lender on the same device."""

    def __init__(self, folder: Path) -> None:
        path = folder / "pages"
        # The guest's alias page, that of the lender's window, its pages, and some that are free.
        self.device = StandInDevice((2 + LENT_PAGES + OWN_PAGES) * PAGE)
        self.host = StandInDriver(self.device)
        pool = PagePool(self.host, PAGE)
        self.lender = PageServer(self.host, PAGE, path, pool)
        self.lender.give(pool.take(LENT_PAGES))
        self.driver = StandInDriver(self.device)
        config = kv_config(BLOCKS, WIDE, on_gpu=True)
        size = config.kv_cache_tensors[0].size
        self.reservation = reserve_kv(settings_of(GUEST, path), self.driver, size)
        source: Any = self.reservation.source
        self.borrower: PageClient = source
        pages, granules = kv_pages(
            engine_of(device_caches(config, self.reservation.address)), config
        )
        self.manager = manager_of(config)
        self.pool = BalloonedPool(self.manager.block_pool, granules, pages)
        self.now_ns = 1
        self.rollouts: list[Rollout] = []
        self.kv = GuestKv(
            self.pool, lambda: self.rollouts, self._preempt, clock_ns=lambda: self.now_ns
        )

    def fit(self) -> bool:
        self.now_ns += 10**9
        live = {"heartbeat_ns": self.now_ns, "expiry_ns": self.now_ns + 10**9}
        return self.kv.fit(Grant(**live))

    def settle(self, times: int = 4) -> None:
        for _ in range(times):
            self.lender.step()
            self.fit()

    def run_everywhere(self) -> None:
        """One rollout in each granule."""
        blocks = self.manager.block_pool.get_new_blocks(self.kv.capacity_blocks)
        by_granule: dict[int, list[Any]] = {}
        for block in blocks:
            by_granule.setdefault(self.pool.granules.of(block.block_id), []).append(block)
        self._blocks = {f"r{granule}": found for granule, found in by_granule.items()}
        self.rollouts = [
            Rollout(name, 100, {block.block_id for block in found})
            for name, found in self._blocks.items()
        ]

    def _preempt(self, names: Collection[str]) -> None:
        for name in names:
            self.manager.block_pool.free_blocks(self._blocks.pop(name))
        self.rollouts = [rollout for rollout in self.rollouts if rollout.request_id not in names]


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BorrowingGuest]:
    monkeypatch.setattr(source_module, "HEADROOM_BYTES", NO_HEADROOM)
    made = BorrowingGuest(tmp_path)
    yield made
    made.reservation.close()
    made.lender.close()
    made.host.die()
    assert made.driver.is_clean
    assert made.device.used_bytes == 0


def test_a_guest_begins_with_what_there_is_and_grows_on_what_its_host_lends(
    guest: BorrowingGuest,
) -> None:
    assert guest.kv.mapped.granules_mapped == OWN_PAGES
    assert guest.kv.capacity_blocks == OWN_PAGES * 2 - 1
    assert guest.manager.block_pool.get_num_free_blocks() == guest.kv.capacity_blocks
    assert guest.kv.mapped.bytes_mapped == OWN_PAGES * PAGE
    guest.settle()
    assert guest.kv.mapped.granules_mapped == GRANULES
    assert guest.borrower.borrowed == LENT_PAGES == guest.lender.lent
    assert guest.kv.mapped.bytes_mapped == BLOCKS * WIDE.page_size_bytes * 2


@pytest.mark.parametrize("busy", [False, True], ids=["free", "in use"])
def test_pages_that_are_called_back_are_the_borrowed_ones_in_use_or_not(
    guest: BorrowingGuest, busy: bool
) -> None:
    guest.settle()
    if busy:
        guest.run_everywhere()
    guest.lender.recall(4)
    guest.settle()
    assert guest.lender.idle == 4
    assert guest.borrower.wanted == 0
    assert guest.borrower.borrowed == LENT_PAGES - 4
    assert guest.kv.mapped.granules_mapped == GRANULES - 4, "and no own page for it"
    if busy:
        assert len(guest.rollouts) == GRANULES - 4
    guest.lender.recall(0)
    guest.settle()
    assert guest.kv.mapped.granules_mapped == GRANULES


def test_pages_wait_for_the_step_in_flight_and_no_other_begins(guest: BorrowingGuest) -> None:
    guest.settle()
    guest.kv.step_begun()
    guest.lender.recall(4)
    guest.lender.step()
    assert not guest.fit()
    assert not guest.fit(), "what is on its way is not taken twice"
    guest.lender.step()
    assert guest.lender.idle == 0
    guest.kv.step_done()
    assert guest.fit()
    guest.lender.step()
    assert guest.lender.idle == 4


def test_an_idle_engine_hears_its_host_when_it_is_woken(guest: BorrowingGuest) -> None:
    guest.settle()
    assert not guest.kv.must_shrink(None)
    guest.lender.recall(2)
    guest.lender.step()
    assert guest.kv.must_shrink(None)
    guest.fit()
    assert not guest.kv.must_shrink(None)


def test_what_came_and_is_not_mapped_yet_is_told_as_held(guest: BorrowingGuest) -> None:
    before = guest.kv.mapped.granules_mapped
    guest.lender.step()
    assert guest.kv.must_shrink(None), "one step, to tell of it"
    assert guest.kv.mapped.granules_mapped == before + LENT_PAGES


def test_a_page_that_cannot_be_imported_now_is_lent_again(guest: BorrowingGuest) -> None:
    guest.driver.fails = scripted("import_handle", 3)
    guest.settle(8)
    assert guest.kv.mapped.granules_mapped == GRANULES


def test_a_guest_without_a_lender_does_not_start_and_a_host_without_a_socket_serves(
    tmp_path: Path,
) -> None:
    driver = StandInDriver(StandInDevice(8 * PAGE))
    with pytest.raises(LoanError, match="start the host first"):
        page_source(settings_of(GUEST, tmp_path / "none"), driver)
    for settings in (
        settings_of(GUEST, ""),
        settings_of(HOST, ""),
        settings_of(HOST, tmp_path / "pages", OBSERVE),
        settings_of(HOST, tmp_path / "no" / "folder"),
    ):
        assert isinstance(page_source(settings, driver), PagePool)
    assert isinstance(page_source(settings_of(HOST, tmp_path / "pages"), driver), PageServer)


def test_a_socket_of_a_killed_lender_is_taken_over_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    driver = StandInDriver(StandInDevice(8 * PAGE))
    first = PageServer(driver, PAGE, tmp_path / "pages", PagePool(driver, PAGE))
    with pytest.raises(LoanError, match=r"pages cannot be lent at .*: Address"):
        PageServer(driver, PAGE, tmp_path / "pages", PagePool(driver, PAGE))
    first._listener.close()  # As the end of its process does.
    second = PageServer(driver, PAGE, tmp_path / "pages", PagePool(driver, PAGE))
    second.close()


def test_a_guest_for_whom_there_is_not_one_granule_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "HEADROOM_BYTES", NO_HEADROOM)
    driver = StandInDriver(StandInDevice(PAGE))  # The alias page has it.
    config = kv_config(BLOCKS, WIDE, on_gpu=True)
    size = config.kv_cache_tensors[0].size
    with pytest.raises(DeviceError):
        reserve_kv(settings_of(HOST, ""), driver, size)
    reservation = reserve_kv(settings_of(GUEST, ""), driver, size)
    with pytest.raises(DeviceMemoryShort):
        kv_pages(engine_of(device_caches(config, reservation.address)), config)
    reservation.close()
