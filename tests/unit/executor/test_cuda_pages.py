"""The balloon's pages on a GPU: what goes is nobody's, what returns is zeroed."""

import random
from collections.abc import Sequence

import pytest
from cuda_cases import ZEROS, Gpu, gpu

from executor.cuda.backing import Reservation, layer, reservation_at, whole
from executor.errors import DeviceError, DeviceMemoryShort
from executor.kv.backing import Extent
from executor.kv.shrink_plan import Granules
from tests.fakes.driver import PAGE, StandInDevice, StandInDriver, scripted

__all__ = ["gpu"]
LAYERS = 2


def layers_outermost(base: int, block: int, blocks: int) -> list[Extent]:
    return [Extent(base + number * blocks * block, block, block) for number in range(LAYERS)]


def blocks_outermost(base: int, block: int, _blocks: int) -> list[Extent]:
    return [Extent(base + number * block, LAYERS * block, block) for number in range(LAYERS)]


def marks(gpu: Gpu, extents: Sequence[Extent], block: int) -> list[tuple[int, bytes]]:
    """First and last bytes of a block in each layer, and what is to be there."""
    found = []
    for number, extent in enumerate(extents):
        start = extent.base + block * extent.stride
        for end, at in enumerate((start, start + extent.block_bytes - len(ZEROS))):
            found.append((at, gpu.pattern((block * LAYERS + number) * 2 + end)))
    return found


@pytest.mark.parametrize("layout", [layers_outermost, blocks_outermost])
@pytest.mark.parametrize("eighths", [3, 4, 8], ids=["odd", "half a page", "a page"])
def test_only_whole_pages_of_held_granules_go(gpu: Gpu, layout: object, eighths: int) -> None:
    rng = random.Random(eighths)
    block, blocks = gpu.page_bytes * eighths // 8, 14
    granules = Granules(blocks, granule_blocks=2)
    reservation = Reservation(gpu.driver, LAYERS * blocks * block)
    assert callable(layout)
    extents = layout(reservation.address, block, blocks)
    pages = reservation.backend(extents, granules)
    held: set[int] = set()

    def rewrite(numbers: Sequence[int]) -> None:
        for granule in numbers:
            for at, mark in (
                m for b in granules.blocks_of(granule) for m in marks(gpu, extents, b)
            ):
                gpu.write(at, mark)

    rewrite(range(granules.count))
    for _ in range(25):
        if held and rng.random() < 0.5:
            back = rng.sample(sorted(held), rng.randint(1, len(held)))
            pages.restore(back)
            held.difference_update(back)
            rewrite(back)
        else:
            free = [granule for granule in range(1, granules.count) if granule not in held]
            more = rng.sample(free, rng.randint(0, len(free)))
            pages.release(more)
            held.update(more)
        whole_pages = whole_pages_held(reservation, extents, granules, held)
        assert pages.bytes_returned == whole_pages * gpu.page_bytes
        for granule in set(range(granules.count)) - held:
            for number in granules.blocks_of(granule):
                for at, mark in marks(gpu, extents, number):
                    assert gpu.read(at, len(mark)) == mark, "a mapped block was touched"
    pages.restore(held)
    assert pages.bytes_returned == 0
    reservation.close()


def whole_pages_held(
    reservation: Reservation, extents: Sequence[Extent], granules: Granules, held: set[int]
) -> int:
    """Pages of which every byte that belongs to a block belongs to a held one, byte by byte."""
    step = reservation.page_bytes // 8
    needed: dict[int, bool] = {}
    for granule in range(granules.count):
        for block in granules.blocks_of(granule):
            for extent in extents:
                start = extent.base + block * extent.stride - reservation.address
                for at in range(start, start + extent.block_bytes, step):
                    page = at // reservation.page_bytes
                    needed[page] = needed.get(page, False) or granule not in held
    return sum(not need for need in needed.values())


def one_page_blocks(driver: StandInDriver, blocks: int = 8) -> tuple[Reservation, list[Extent]]:
    reservation = Reservation(driver, blocks * PAGE)
    return reservation, [Extent(reservation.address, PAGE, PAGE)]


def test_a_page_comes_back_zeroed_whatever_was_in_it(gpu: Gpu) -> None:
    reservation = Reservation(gpu.driver, 8 * gpu.page_bytes, most_spare=8)
    extents = [Extent(reservation.address, gpu.page_bytes, gpu.page_bytes)]
    pages = reservation.backend(extents, Granules(8, 1))
    for at, mark in marks(gpu, extents, 3):
        gpu.write(at, mark)
    pages.release([3])
    gpu.write(extents[0].base + 3 * gpu.page_bytes, gpu.pattern(9))  # A stray write hits nobody.
    pages.restore([3])
    for at, _ in marks(gpu, extents, 3):
        assert gpu.read(at, len(ZEROS)) == ZEROS
    reservation.close()


def test_the_device_gets_back_what_is_claimed_and_no_less() -> None:
    device = StandInDevice(64 * PAGE)
    reservation, extents = one_page_blocks(StandInDriver(device))
    pages = reservation.backend(extents, Granules(8, 1))
    before = device.used_bytes
    pages.release([2, 3, 7])
    assert before - device.used_bytes == pages.bytes_returned == 3 * PAGE
    pages.restore([3])
    assert before - device.used_bytes == pages.bytes_returned == 2 * PAGE
    reservation.close()
    assert device.used_bytes == 0


def test_pages_that_are_kept_are_not_claimed() -> None:
    device = StandInDevice(64 * PAGE)
    driver = StandInDriver(device)
    reservation = Reservation(driver, 8 * PAGE, most_spare=2)
    pages = reservation.backend([Extent(reservation.address, PAGE, PAGE)], Granules(8, 1))
    before = device.used_bytes
    pages.release([2, 3, 7])
    assert before - device.used_bytes == pages.bytes_returned == PAGE
    reservation.close()


def test_granules_not_released_yet_are_left_alone_when_they_are_wanted_back() -> None:
    driver = StandInDriver(StandInDevice(64 * PAGE))
    reservation, extents = one_page_blocks(driver)
    pages = reservation.backend(extents, Granules(8, 1))
    driver.write(extents[0].base + 2 * PAGE, b"kept")
    pages.restore([2])
    assert driver.read(extents[0].base + 2 * PAGE, 4) == b"kept"
    pages.release([2])
    pages.release([2])
    assert pages.bytes_returned == PAGE
    pages.restore([2])
    assert pages.bytes_returned == 0
    reservation.close()


@pytest.mark.parametrize("name", ["create", "map", "set_access", "fill"])
@pytest.mark.parametrize("number", [0, 1])
def test_granules_come_back_all_or_not_at_all(name: str, number: int) -> None:
    device = StandInDevice(64 * PAGE)
    driver = StandInDriver(device)
    reservation, extents = one_page_blocks(driver)
    pages = reservation.backend(extents, Granules(8, 1))
    driver.write(extents[0].base, b"kept")
    pages.release([2, 3, 6])
    before, used = pages.bytes_returned, device.used_bytes
    driver.calls.clear()
    driver.fails = scripted(name, number)
    with pytest.raises(DeviceMemoryShort):
        pages.restore([2, 3, 6])
    assert (pages.bytes_returned, device.used_bytes) == (before, used)
    driver.fails = lambda _name, _number: None
    assert driver.read(extents[0].base, 4) == b"kept"
    pages.restore([2, 3, 6])
    assert pages.bytes_returned == 0
    assert driver.read(extents[0].base + 2 * PAGE, 4) == bytes(4)
    reservation.close()


@pytest.mark.parametrize("name", ["map", "set_access"])
def test_granules_go_all_or_not_at_all(name: str) -> None:
    driver = StandInDriver(StandInDevice(64 * PAGE))
    reservation, extents = one_page_blocks(driver)
    pages = reservation.backend(extents, Granules(8, 1))
    driver.write(extents[0].base + 2 * PAGE, b"kept")
    driver.calls.clear()
    driver.fails = scripted(name, 1)
    with pytest.raises(DeviceMemoryShort):
        pages.release([2, 5])
    assert pages.bytes_returned == 0
    assert driver.read(extents[0].base + 2 * PAGE, 4) == b"kept"
    pages.release([2, 5])
    assert pages.bytes_returned == 2 * PAGE
    reservation.close()


def test_an_engine_that_does_not_fit_leaves_nothing_behind() -> None:
    driver = StandInDriver(StandInDevice(4 * PAGE))
    with pytest.raises(DeviceMemoryShort):
        Reservation(driver, 4 * PAGE)  # And one more for the alias page.
    assert driver.is_clean
    with pytest.raises(DeviceError, match="give the engine more GPU memory"):
        Reservation(driver, 0)


def test_tensors_are_views_of_the_reserved_addresses() -> None:
    driver = StandInDriver(StandInDevice(64 * PAGE))
    reservation = Reservation(driver, 3 * PAGE + 512)
    everything = whole(reservation).__cuda_array_interface__
    assert everything["shape"] == (3 * PAGE + 512,)
    assert everything["data"] == (reservation.address, False)
    assert (everything["typestr"], everything["strides"]) == ("|i1", None)
    second = Extent(reservation.address + 4096, 8192, 4096)
    view = layer(reservation, second, blocks=5).__cuda_array_interface__
    assert (view["shape"], view["strides"]) == ((5, 4096), (8192, 1))
    assert view["data"] == (reservation.address + 4096, False)
    with pytest.raises(ValueError, match="are not KV memory"):
        layer(reservation, Extent(reservation.address, PAGE, PAGE), blocks=4)
    reservation.close()


def test_a_reservation_is_found_by_its_address_for_as_long_as_it_is_there() -> None:
    driver = StandInDriver(StandInDevice(64 * PAGE))
    reservation, _ = one_page_blocks(driver)
    assert reservation_at(reservation.address) is reservation
    assert reservation_at(reservation.address + PAGE) is None
    reservation.close()
    assert reservation_at(reservation.address) is None
    assert driver.is_clean
