"""KV addresses on a GPU: each has memory at any time, and a failed change changed nothing."""

from collections import Counter

import pytest
from cuda_cases import ZEROS, Gpu, gpu

from executor.cuda.backing import VirtualMapping
from executor.cuda.driver import Handle
from executor.cuda.page_pool import PagePool
from executor.errors import DeviceError, DeviceMemoryShort, MappingLost
from tests.fakes.driver import PAGE, StandInDevice, StandInDriver, scripted

__all__ = ["gpu"]
PAGES = 8


def test_pages_of_their_own_differ_and_all_others_are_the_alias_page(gpu: Gpu) -> None:
    pool = PagePool(gpu.driver, gpu.page_bytes)
    mapping = VirtualMapping(gpu.driver, gpu.page_bytes, PAGES)
    own = pool.take(2)
    assert mapping.back([3, 6], own) == [mapping.alias] * 2
    mapping.zero([3, 6])
    for page in (3, 6):
        assert gpu.read(mapping.address(page), len(ZEROS)) == ZEROS
        gpu.write(mapping.address(page), gpu.pattern(page))
    gpu.write(mapping.address(0), gpu.pattern(0))
    for page in range(PAGES):
        seed = page if page in (3, 6) else 0
        assert gpu.read(mapping.address(page), len(ZEROS)) == gpu.pattern(seed)
    pool.give(mapping.close())


def test_it_begins_zeroed_on_the_pages_it_is_given(gpu: Gpu) -> None:
    pool = PagePool(gpu.driver, gpu.page_bytes)
    mapping = VirtualMapping(gpu.driver, gpu.page_bytes, PAGES, pool.take(5))
    for page in range(PAGES):
        assert gpu.read(mapping.address(page), len(ZEROS)) == ZEROS
    pool.give(mapping.close())


def test_pages_that_do_not_fit_the_device_are_refused(gpu: Gpu) -> None:
    with pytest.raises(DeviceError, match="give a multiple of"):
        VirtualMapping(gpu.driver, gpu.page_bytes + 4096, PAGES)


def test_access_is_set_in_one_call_for_a_run() -> None:
    driver = StandInDriver(StandInDevice(64 * PAGE))
    mapping = VirtualMapping(driver, PAGE, PAGES)
    pool = PagePool(driver, PAGE)
    driver.calls.clear()
    mapping.back([1, 2, 3, 6, 7], pool.take(5))
    assert driver.calls["set_access"] == 2
    assert driver.calls["map"] == driver.calls["unmap"] == 5


def calls_of(driver: StandInDriver, mapping: VirtualMapping, handles: list[Handle]) -> Counter[str]:
    driver.calls.clear()
    old = mapping.back([1, 2, 5], handles)
    counted = Counter(driver.calls)
    mapping.back([1, 2, 5], old)
    return counted


def test_a_failure_at_any_call_leaves_every_page_and_its_content() -> None:
    driver = StandInDriver(StandInDevice(64 * PAGE))
    pool = PagePool(driver, PAGE)
    mapping = VirtualMapping(driver, PAGE, PAGES, pool.take(PAGES))
    fresh = pool.take(3)
    for page in range(PAGES):
        driver.write(mapping.address(page), bytes([page] * 8))
    counted = calls_of(driver, mapping, fresh)
    assert counted == {"map": 3, "unmap": 3, "set_access": 2}
    for name, times in counted.items():
        for number in range(times):
            driver.calls.clear()
            driver.fails = scripted(name, number)
            with pytest.raises(DeviceMemoryShort, match=f"{name} fails by script"):
                mapping.back([1, 2, 5], fresh)
            for page in range(PAGES):
                assert driver.read(mapping.address(page), 8) == bytes([page] * 8), (name, number)
    driver.fails = lambda _name, _number: None
    pool.give([*mapping.close(), *fresh])
    assert driver.is_clean


def test_when_even_putting_back_fails_it_says_so() -> None:
    driver = StandInDriver(StandInDevice(64 * PAGE))
    pool = PagePool(driver, PAGE)
    mapping = VirtualMapping(driver, PAGE, PAGES, pool.take(PAGES))

    def broken(name: str, _number: int) -> None:
        if name == "map":
            raise DeviceError("stand-in: the GPU fell off the bus")

    driver.fails = broken
    with pytest.raises(MappingLost, match="start the engine anew"):
        mapping.back([4], [mapping.alias])


@pytest.mark.parametrize("name", ["create", "reserve", "map", "set_access", "fill"])
def test_a_mapping_that_cannot_be_made_leaves_nothing_behind(name: str) -> None:
    driver = StandInDriver(StandInDevice(64 * PAGE))
    driver.fails = scripted(name, 0)
    with pytest.raises(DeviceMemoryShort):
        VirtualMapping(driver, PAGE, PAGES)
    assert driver.is_clean


def test_pages_that_may_still_be_written_to_are_not_unmapped() -> None:
    driver = StandInDriver(StandInDevice(64 * PAGE))
    mapping = VirtualMapping(driver, PAGE, PAGES)
    driver.calls.clear()
    driver.fails = scripted("synchronize", 0)
    with pytest.raises(MappingLost, match="may still be written to"):
        mapping.zero([1, 2])
    driver.calls.clear()
    with pytest.raises(MappingLost, match="may still be written to"):
        VirtualMapping(driver, PAGE, PAGES)
    assert driver.calls["unmap"] == 0


def test_a_pool_takes_all_or_nothing_and_leaves_the_headroom() -> None:
    device = StandInDevice(10 * PAGE)
    driver = StandInDriver(device)
    pool = PagePool(driver, PAGE, headroom_bytes=2 * PAGE)
    taken = pool.take(8)
    with pytest.raises(DeviceMemoryShort, match=f"{2 * PAGE} stay free; it may come back"):
        pool.take(1)
    pool.give(taken)
    assert device.used_bytes == 0
    driver.calls.clear()
    driver.fails = scripted("create", 3)
    with pytest.raises(DeviceMemoryShort, match="by script"):
        pool.take(5)
    assert driver.is_clean


def test_kept_pages_are_taken_first_and_released_at_the_end() -> None:
    device = StandInDevice(10 * PAGE)
    driver = StandInDriver(device)
    pool = PagePool(driver, PAGE, most_spare=3)
    pool.give(pool.take(5))
    assert pool.idle == 3
    assert device.used_bytes == 3 * PAGE
    driver.calls.clear()
    pool.give(pool.take(3))
    assert driver.calls["create"] == 0
    with pytest.raises(DeviceMemoryShort):
        pool.take(11)
    assert pool.idle == 3, "what was kept stays kept when the rest is not to be had"
    pool.close()
    assert driver.is_clean
