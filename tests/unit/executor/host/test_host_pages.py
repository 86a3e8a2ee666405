"""Real memory of this process: what is claimed as returned is gone, and nothing else is."""

import ctypes
import mmap
import random
from collections.abc import Iterator

import pytest

from executor.errors import PageReleaseError
from executor.kv.backing import (
    Extent,
    HostPages,
    Range,
    coalesce,
    discard,
    resident_bytes,
    runs,
    use_huge_pages,
)
from executor.kv.shrink_plan import Granules

PAGE = mmap.PAGESIZE
SKEW = 64  # vLLM's storage begins so many bytes behind a page boundary.


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, 256 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area[:] = b"\xaa" * len(area)
        yield area


def address_of(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def resident_pages(area: mmap.mmap) -> int:
    start = address_of(area)
    return resident_bytes(Range(start, start + len(area))) // PAGE


@pytest.mark.parametrize("layout", ["layer outermost", "block outermost"])
def test_only_whole_pages_of_held_blocks_go_and_they_come_back_zeroed(
    memory: mmap.mmap, layout: str
) -> None:
    rng = random.Random(5)
    granules = Granules(blocks=30, granule_blocks=3)
    block = PAGE + 512
    base = address_of(memory) + SKEW
    extents = (
        [Extent(base, block, block), Extent(base + 30 * block, block, block)]
        if layout == "layer outermost"
        else [Extent(base, 2 * block, block), Extent(base + block, 2 * block, block)]
    )
    pages = HostPages(extents, granules, bytes_total=60 * block)
    whole = resident_pages(memory)
    held: set[int] = set()
    for _ in range(60):
        if held and rng.random() < 0.5:
            back = rng.sample(sorted(held), rng.randint(1, len(held)))
            pages.restore(back)
            held.difference_update(back)
            for granule in back:
                rewrite(memory, base, extents, granules.blocks_of(granule))
        else:
            free = [granule for granule in range(1, granules.count) if granule not in held]
            more = rng.sample(free, rng.randint(0, len(free)))
            pages.release(more)
            held.update(more)
        assert (whole - resident_pages(memory)) * PAGE == pages.bytes_returned
        for granule in set(range(granules.count)) - held:
            for extent in extents:
                for number in granules.blocks_of(granule):
                    at = extent.base - base + SKEW + number * extent.stride
                    assert memory[at : at + block] == b"\xaa" * block, "a mapped block was touched"
    pages.restore(held)
    assert pages.bytes_returned == 0


def rewrite(memory: mmap.mmap, base: int, extents: list[Extent], blocks: range) -> None:
    for extent in extents:
        for number in blocks:
            at = extent.base - base + SKEW + number * extent.stride
            memory[at : at + extent.block_bytes] = b"\xaa" * extent.block_bytes


def test_a_page_that_two_held_granules_share_is_returned_too(memory: mmap.mmap) -> None:
    granules = Granules(blocks=8, granule_blocks=1)
    extent = Extent(address_of(memory) + SKEW, 4 * PAGE, 4 * PAGE)
    pages = HostPages([extent], granules, bytes_total=32 * PAGE)
    pages.release([3])
    assert pages.bytes_returned == 3 * PAGE
    pages.release([4])
    assert pages.bytes_returned == 7 * PAGE
    pages.restore([3])
    assert pages.bytes_returned == 3 * PAGE


def test_what_is_touched_behind_the_balloons_back_is_not_claimed(memory: mmap.mmap) -> None:
    granules = Granules(blocks=8, granule_blocks=1)
    extent = Extent(address_of(memory), 4 * PAGE, 4 * PAGE)
    pages = HostPages([extent], granules, bytes_total=32 * PAGE)
    pages.release([2])
    memory[2 * 4 * PAGE] = 1
    pages.release([3])
    assert pages.bytes_returned == 8 * PAGE, "the whole run is discarded again, and measured again"
    memory[2 * 4 * PAGE] = 1
    pages.restore([3])
    pages.release([5])
    assert pages.bytes_returned == 8 * PAGE, "a run is measured when it grows, and not before"
    pages.release([3])
    assert pages.bytes_returned == 16 * PAGE - 4 * PAGE


def test_what_was_not_gone_is_claimed_of_no_part_of_its_run(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    granules = Granules(blocks=8, granule_blocks=1)
    extent = Extent(address_of(memory), 4 * PAGE, 4 * PAGE)
    pages = HostPages([extent], granules, bytes_total=32 * PAGE)
    monkeypatch.setattr("executor.kv.backing.resident_bytes", lambda _: PAGE)
    pages.release([2, 3, 4])
    assert pages.bytes_returned == 11 * PAGE
    monkeypatch.setattr("executor.kv.backing.resident_bytes", None)
    pages.restore([3])
    assert pages.bytes_returned == 2 * 3 * PAGE
    pages.restore([2, 4])
    assert pages.bytes_returned == 0


def test_memory_that_the_kernel_will_not_take_is_an_error() -> None:
    with pytest.raises(PageReleaseError, match="locked memory"):
        discard(Range(PAGE, 2 * PAGE))  # Nothing is ever mapped there.
    with pytest.raises(PageReleaseError, match="cannot be measured"):
        resident_bytes(Range(PAGE, 2 * PAGE))


def test_ranges_and_runs() -> None:
    assert coalesce([Range(5, 7), Range(0, 3), Range(3, 5), Range(9, 9 + 2)]) == [
        Range(0, 7),
        Range(9, 11),
    ]
    assert Range(1, 2 * PAGE + 1).whole_pages() == Range(PAGE, 2 * PAGE)
    assert Range(1, PAGE - 1).whole_pages().size == 0
    assert runs([4, 1, 2, 6]) == [range(1, 3), range(4, 5), range(6, 7)]


def test_huge_pages_are_a_wish_and_leave_zeroed_memory_that_can_be_returned(
    memory: mmap.mmap,
) -> None:
    start = address_of(memory)
    whole = Range(start, start + len(memory))
    use_huge_pages(whole)
    assert memory[:] == bytes(len(memory))
    discard(Range(start, start + 8 * PAGE))
    assert resident_pages(memory) == 256 - 8
    use_huge_pages(Range(start, start))


def test_held_memory_does_not_come_back_with_its_neighbours_huge_page() -> None:
    huge = 2 << 20
    with mmap.mmap(-1, 3 * huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        start = -(-address_of(area) // huge) * huge
        use_huge_pages(Range(start, start + huge))
        block = huge // 4
        pages = HostPages([Extent(start, block, block)], Granules(4, 1), bytes_total=huge)
        pages.release([0, 1, 2, 3])
        assert pages.bytes_returned == huge
        pages.restore([1])
        area[start + block - address_of(area)] = 1
        held = [Range(start, start + block), Range(start + 2 * block, start + huge)]
        assert sum(resident_bytes(piece) for piece in held) == 0
        assert pages.bytes_returned == 3 * block
