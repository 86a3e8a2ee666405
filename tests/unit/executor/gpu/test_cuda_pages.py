"""KV pages on a GPU: the rules of its driver, addresses that always have memory, pages."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_cases import ZEROS, Gpu, driver, gpu

from executor import cuda
from executor.cuda import driver as cuda_driver
from executor.cuda.backing import Reservation, VirtualMapping, layer, reservation_at, whole
from executor.cuda.page_pool import PagePool
from executor.errors import DeviceError, DeviceMemoryShort, MappingLost
from executor.kv.backing import Extent
from executor.kv.shrink_plan import Granules
from tests.fakes.cuda.driver import PAGE, StandInDevice, StandInDriver, scripted

__all__ = ["driver", "gpu"]


LAYERS, PAGES = 2, 8


def mapped(gpu: Gpu, pages: int = 2) -> tuple[int, list[Any]]:
    """Addresses of `pages` pages with one more behind them, and the handles of the first."""
    driver, size = gpu.driver, gpu.page_bytes
    base = driver.reserve((pages + 1) * size)
    handles = [driver.create(size) for _ in range(pages)]
    for number, handle in enumerate(handles):
        driver.map(base + number * size, size, handle)
    return base, handles


def unmapped(gpu: Gpu, base: int, handles: list[Any], *, still: int) -> None:
    for number in range(still):
        gpu.driver.unmap(base + number * gpu.page_bytes, gpu.page_bytes)
    gpu.driver.unreserve(base, (len(handles) + 1) * gpu.page_bytes)
    for handle in handles:
        gpu.driver.release(handle)


def test_a_run_of_mappings_is_usable_in_one_call_and_what_breaks_a_rule_is_refused(
    gpu: Gpu,
) -> None:
    driver, size = gpu.driver, gpu.page_bytes
    base, handles = mapped(gpu)
    for broken in (
        lambda: driver.map(base, size, handles[1]),
        lambda: driver.map(base + 2 * size + 4096, size, handles[1]),
        lambda: driver.set_access(base, 3 * size),
        lambda: driver.unmap(base + 2 * size, size),
        lambda: driver.create(size + 4096),
    ):
        with pytest.raises(DeviceError):
            broken()
    driver.set_access(base, 2 * size)
    driver.fill(base, 7, 2 * size)
    driver.synchronize()
    assert gpu.read(base + size - 32, 32) == gpu.read(base + size, 32) == bytes([7] * 32)
    unmapped(gpu, base, handles, still=2)


@pytest.mark.parametrize("way", ["twice", "exported"])
def test_a_page_at_two_addresses_is_the_same_memory(gpu: Gpu, way: str) -> None:
    """Mapped twice it outlives its handle; exported, it is what another process imports."""
    driver, size = gpu.driver, gpu.page_bytes
    base = driver.reserve(2 * size)
    first = second = driver.create(size)
    if way == "exported":
        descriptor = driver.export_handle(first)
        second = driver.import_handle(descriptor)
        os.close(descriptor)
    driver.map(base, size, first)
    driver.map(base + size, size, second)
    driver.set_access(base, 2 * size)
    for handle in {first, second}:
        driver.release(handle)
    gpu.write(base, gpu.pattern(1))
    assert gpu.read(base + size, len(ZEROS)) == gpu.pattern(1)
    for at in (base, base + size):
        driver.unmap(at, size)
    driver.unreserve(base, 2 * size)


def test_free_memory_falls_by_what_is_created_and_comes_back(gpu: Gpu) -> None:
    pages = 16
    before = gpu.driver.free_bytes()
    handles = [gpu.driver.create(gpu.page_bytes) for _ in range(pages)]
    assert before - gpu.driver.free_bytes() >= pages * gpu.page_bytes
    for handle in handles:
        gpu.driver.release(handle)
    assert gpu.driver.free_bytes() >= before


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (0, None, ""),
        (2, DeviceMemoryShort, r"^cuMemRelease: the GPU is out of memory"),
        (700, DeviceError, r"^cuMemRelease failed with 700;"),
    ],
)
def test_a_result_of_the_driver_is_one_clear_line(
    code: int, error: type[DeviceError] | None, message: str
) -> None:
    results = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_OUT_OF_MEMORY=2)
    driver = object.__new__(cuda_driver.Driver)
    driver._cuda = SimpleNamespace(CUresult=results, cuMemRelease=lambda _handle: (code,))
    with pytest.raises(error, match=message) if error else nullcontext():
        driver.release(cuda_driver.Handle(1))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"install rose-rollout\[cuda\]"):
        cuda_driver.open_driver()


def test_a_machine_without_a_gpu_does_not_notice() -> None:
    """All of it can be imported, and nothing of it asks for a package of CUDA's, or for torch."""
    folder = Path(cuda.__path__[0])
    names = [
        ".".join(("executor.cuda", *path.relative_to(folder).with_suffix("").parts))
        for path in folder.rglob("*.py")
    ]
    assert len(names) == 7
    code = f"import sys, importlib; [importlib.import_module(name) for name in {names}]"
    code += "; assert not {'cuda', 'torch', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pages_of_their_own_differ_and_all_others_are_the_alias_page(gpu: Gpu) -> None:
    pool = PagePool(gpu.driver, gpu.page_bytes)
    mapping = VirtualMapping(gpu.driver, gpu.page_bytes, PAGES, pool.take(5))
    for page in range(PAGES):
        assert gpu.read(mapping.address(page), len(ZEROS)) == ZEROS
    pool.give(mapping.close())
    mapping = VirtualMapping(gpu.driver, gpu.page_bytes, PAGES)
    assert mapping.back([3, 6], pool.take(2)) == [mapping.alias] * 2
    mapping.zero([3, 6])
    for page in (3, 6):
        assert gpu.read(mapping.address(page), len(ZEROS)) == ZEROS
        gpu.write(mapping.address(page), gpu.pattern(page))
    gpu.write(mapping.address(0), gpu.pattern(0))
    for page in range(PAGES):
        seed = page if page in (3, 6) else 0
        assert gpu.read(mapping.address(page), len(ZEROS)) == gpu.pattern(seed)
    pool.give(mapping.close())
    with pytest.raises(DeviceError, match="give a multiple of"):
        VirtualMapping(gpu.driver, gpu.page_bytes + 4096, PAGES)


def test_a_failure_at_any_call_leaves_every_page_and_its_content(driver: StandInDriver) -> None:
    pool = PagePool(driver, PAGE)
    mapping = VirtualMapping(driver, PAGE, PAGES, pool.take(PAGES))
    fresh, changed = pool.take(3), [1, 2, 5]
    driver.calls.clear()
    old = mapping.back(changed, fresh)
    counted = Counter(driver.calls)
    mapping.back(changed, old)
    assert counted == {"map": 3, "unmap": 3, "set_access": 2}, "access is set once for a run"
    for page in range(PAGES):
        driver.write(mapping.address(page), bytes([page] * 8))
    for name, times in counted.items():
        for number in range(times):
            driver.calls.clear()
            driver.fails = scripted(name, number)
            with pytest.raises(DeviceMemoryShort, match=f"{name} fails by script"):
                mapping.back(changed, fresh)
            for page in range(PAGES):
                assert driver.read(mapping.address(page), 8) == bytes([page] * 8), (name, number)
    driver.fails = lambda _name, _number: None
    pool.give([*mapping.close(), *fresh])


def test_when_even_putting_back_fails_it_says_so(driver: StandInDriver) -> None:
    pool = PagePool(driver, PAGE)
    mapping = VirtualMapping(driver, PAGE, PAGES, pool.take(PAGES))

    def broken(name: str, _number: int) -> None:
        if name == "map":
            raise DeviceError("stand-in: the GPU fell off the bus")

    driver.fails = broken
    with pytest.raises(MappingLost, match="start the engine anew"):
        mapping.back([4], [mapping.alias])
    driver.die()


@pytest.mark.parametrize("name", ["create", "reserve", "map", "set_access", "fill"])
def test_a_mapping_that_cannot_be_made_leaves_nothing_behind(
    driver: StandInDriver, name: str
) -> None:
    driver.fails = scripted(name, 0)
    with pytest.raises(DeviceMemoryShort):
        VirtualMapping(driver, PAGE, PAGES)


def test_pages_that_may_still_be_written_to_are_not_unmapped(driver: StandInDriver) -> None:
    mapping = VirtualMapping(driver, PAGE, PAGES)
    for write in (lambda: mapping.zero([1, 2]), lambda: VirtualMapping(driver, PAGE, PAGES)):
        driver.calls.clear()
        driver.fails = scripted("synchronize", 0)
        with pytest.raises(MappingLost, match="may still be written to"):
            write()
        assert driver.calls["unmap"] == 0
    driver.die()


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


def test_kept_pages_are_taken_first_and_released_at_the_end(driver: StandInDriver) -> None:
    pool = PagePool(driver, PAGE, most_spare=3)
    pool.give(pool.take(5))
    assert pool.idle == len(driver.handles) == 3
    driver.calls.clear()
    pool.give(pool.take(3))
    assert driver.calls["create"] == 0
    with pytest.raises(DeviceMemoryShort):
        pool.take(65)
    assert pool.idle == 3, "what was kept stays kept when the rest is not to be had"
    pool.close()


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


class Cache:
    """Eight blocks of a page each: a granule is a block."""

    def __init__(self, gpu: Any, page_bytes: int = PAGE, most_spare: int = 0) -> None:
        self.reservation = Reservation(gpu, 8 * page_bytes, most_spare=most_spare)
        self.base = self.reservation.address
        self.extents = [Extent(self.base, page_bytes, page_bytes)]
        self.pages = self.reservation.backend(self.extents, Granules(8, 1))


@pytest.fixture
def cache(driver: StandInDriver) -> Iterator[Cache]:
    made = Cache(driver)
    yield made
    made.reservation.close()


def test_a_page_comes_back_zeroed_whatever_was_in_it(gpu: Gpu) -> None:
    made = Cache(gpu.driver, gpu.page_bytes, most_spare=8)
    for at, mark in marks(gpu, made.extents, 3):
        gpu.write(at, mark)
    made.pages.release([3])
    gpu.write(made.base + 3 * gpu.page_bytes, gpu.pattern(9))  # A stray write hits nobody.
    made.pages.restore([3])
    for at, _ in marks(gpu, made.extents, 3):
        assert gpu.read(at, len(ZEROS)) == ZEROS
    made.reservation.close()


@pytest.mark.parametrize("spare", [0, 2])
def test_the_device_gets_back_what_is_claimed_and_pages_that_are_kept_are_not(spare: int) -> None:
    device = StandInDevice(64 * PAGE)
    made = Cache(StandInDriver(device), most_spare=spare)
    before = device.used_bytes
    made.pages.release([2, 3, 7])
    assert before - device.used_bytes == made.pages.bytes_returned == (3 - spare) * PAGE
    made.pages.restore([3])
    assert before - device.used_bytes == made.pages.bytes_returned == (2 - spare // 2) * PAGE
    made.reservation.close()
    assert device.used_bytes == 0


def test_granules_not_released_yet_are_left_alone_when_they_are_wanted_back(
    driver: StandInDriver, cache: Cache
) -> None:
    driver.write(cache.base + 2 * PAGE, b"kept")
    cache.pages.restore([2])
    assert driver.read(cache.base + 2 * PAGE, 4) == b"kept"
    cache.pages.release([2])
    cache.pages.release([2])
    assert cache.pages.bytes_returned == PAGE
    cache.pages.restore([2])
    assert cache.pages.bytes_returned == 0


@pytest.mark.parametrize("name", ["create", "map", "set_access", "fill"])
@pytest.mark.parametrize("number", [0, 1])
def test_granules_come_back_all_or_not_at_all(
    driver: StandInDriver, cache: Cache, name: str, number: int
) -> None:
    driver.write(cache.base, b"kept")
    cache.pages.release([2, 3, 6])
    before = cache.pages.bytes_returned, driver.free_bytes()
    driver.calls.clear()
    driver.fails = scripted(name, number)
    with pytest.raises(DeviceMemoryShort):
        cache.pages.restore([2, 3, 6])
    assert (cache.pages.bytes_returned, driver.free_bytes()) == before
    driver.fails = lambda _name, _number: None
    assert driver.read(cache.base, 4) == b"kept"
    cache.pages.restore([2, 3, 6])
    assert cache.pages.bytes_returned == 0
    assert driver.read(cache.base + 2 * PAGE, 4) == bytes(4)


@pytest.mark.parametrize("name", ["map", "set_access"])
def test_granules_go_all_or_not_at_all(driver: StandInDriver, cache: Cache, name: str) -> None:
    driver.write(cache.base + 2 * PAGE, b"kept")
    driver.calls.clear()
    driver.fails = scripted(name, 1)
    with pytest.raises(DeviceMemoryShort):
        cache.pages.release([2, 5])
    assert cache.pages.bytes_returned == 0
    assert driver.read(cache.base + 2 * PAGE, 4) == b"kept"
    cache.pages.release([2, 5])
    assert cache.pages.bytes_returned == 2 * PAGE


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


def test_a_reservation_is_found_by_its_address_for_as_long_as_it_is_there(
    driver: StandInDriver,
) -> None:
    reservation = Cache(driver).reservation
    assert reservation_at(reservation.address) is reservation
    assert reservation_at(reservation.address + PAGE) is None
    reservation.close()
    assert reservation_at(reservation.address) is None
