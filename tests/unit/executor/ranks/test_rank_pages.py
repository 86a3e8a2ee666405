"""KV pages over several ranks: what all of them carried out counts, and nothing before."""

import gc
import os
import random
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
from rank_cases import (
    BLOCK_BYTES,
    BLOCKS,
    GRANULE_BLOCKS,
    GRANULE_BYTES,
    GRANULES,
    Engine,
    engine,
)

from executor.errors import DeviceMemoryShort, RankError
from executor.kv.backing import PageBackend
from executor.kv.rank_pages import MEMFD, Operation, RankCall, RankPager, RankPages
from executor.kv.shrink_plan import Granules

BYTES = BLOCKS * BLOCK_BYTES


def test_every_rank_gives_back_and_gets_back_before_the_step_that_uses_it() -> None:
    with engine() as ranks:
        pages = ranks.pages
        assert (pages.bytes_total, pages.bytes_returned, pages.settled) == (BYTES, 0, True)
        pages.release([2, 3, 7])
        assert (pages.bytes_returned, pages.kept, pages.settled) == (0, 3, False)
        residents = [resident for _, resident in ranks.step()]
        assert residents == [BYTES - 3 * GRANULE_BYTES] * 2
        assert (pages.bytes_returned, pages.kept) == (3 * GRANULE_BYTES, 0)
        assert not pages.poll()
        pages.restore([3])
        assert pages.bytes_returned == 2 * GRANULE_BYTES, "from now on, not from then on"
        first = 3 * GRANULE_BLOCKS
        assert [zeroed for zeroed, _ in ranks.step([first])] == [[True]] * 2
        assert (pages.bytes_returned, pages.settled) == (2 * GRANULE_BYTES, True)
        pages.release([3])
        assert [resident for _, resident in ranks.step()] == residents, "written to, and gone again"


def test_what_one_rank_has_not_done_is_not_returned() -> None:
    with engine(3) as ranks:
        pages = ranks.pages
        pages.release([1, 2])
        operations = pages.drain()
        for rank in ranks.ranks[:2]:
            rank.begin(operations)
            rank.end()
        assert (pages.poll(), pages.bytes_returned, pages.kept) == (True, 0, 2)
        ranks.ranks[2].begin(operations)
        ranks.ranks[2].end()
        assert (pages.poll(), pages.bytes_returned, pages.kept) == (False, 2 * GRANULE_BYTES, 0)


@pytest.mark.parametrize("word", [0, 1], ids=["being written", "torn"])
def test_a_report_counts_once_it_is_whole_and_from_the_next_poll_on(word: int) -> None:
    ranks = InProcess()
    pages = ranks.pages
    pages.release([1])
    operations = pages.drain()
    for pager in ranks.pagers:
        pager.carry_out(operations)
    words = ranks.pagers[1]._section._words
    words[word] ^= 1
    assert (pages.poll(), pages.bytes_returned, pages.kept) == (True, 0, 1)
    words[word] ^= 1
    assert (pages.bytes_returned, pages.kept) == (0, 1)
    assert (pages.poll(), pages.bytes_returned, pages.kept) == (False, GRANULE_BYTES, 0)


def test_a_rank_that_hangs_delays_what_counts_and_holds_nobody() -> None:
    with engine() as ranks:
        pages = ranks.pages
        ranks.ranks[1].stop()
        began_s = time.monotonic()
        for granule in range(1, 9):
            pages.release([granule])
            operations = pages.drain()
            assert len(operations) == 1
            for rank in ranks.ranks:
                rank.begin(operations)
            assert (pages.poll(), pages.bytes_returned) == (True, 0)
        assert time.monotonic() - began_s < 1.0
        assert pages.kept == 8
        ranks.ranks[1].go_on()
        for rank in ranks.ranks:
            for _ in range(8):
                rank.end()
        assert (pages.poll(), pages.kept, pages.bytes_returned) == (False, 0, 8 * GRANULE_BYTES)


def test_a_rank_that_fails_is_named_and_touches_no_page_any_more() -> None:
    with engine(broken=1) as ranks:
        pages = ranks.pages
        pages.release([4])
        ranks.step()
        with pytest.raises(RankError, match="rank 1: the kernel keeps them"):
            pages.poll()
        pages.restore([4])
        pages.release([5])
        (_, first), (_, second) = ranks.step([4 * GRANULE_BLOCKS])
        assert (first < BYTES, second) == (True, BYTES)
        assert pages.bytes_returned == 0


def test_operations_are_carried_out_once_and_in_order() -> None:
    (ranks := InProcess()).pages.release([1])
    lost = ranks.pages.drain()
    ranks.pages.release([2])
    ranks.step()
    with pytest.raises(RankError, match="rank 0: operation 2 follows 0"):
        ranks.pages.poll()
    for pager in ranks.pagers:
        pager.carry_out(lost)
    assert ranks.backends[0].released == set()


@pytest.mark.parametrize(
    ("granules", "blocks", "ranks", "line"),
    [
        ((GRANULES, GRANULES), BLOCKS, 3, "no report on the KV pages of rank 2"),
        ((GRANULES, GRANULES), BLOCKS, 4, "no report on the KV pages of rank 2, 3"),
        (
            (GRANULES, Granules(BLOCKS, 8)),
            BLOCKS,
            2,
            "rank 1 has 64 KV blocks in granules of 8, and its engine 64 in granules of 4",
        ),
        ((GRANULES, GRANULES), 65, 2, "rank 0 has 64 KV blocks .* engine 65"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(
    granules: Sequence[Granules], blocks: int, ranks: int, line: str
) -> None:
    gc.collect()
    pagers = [RankPager(MapPages(each), each, n, ranks) for n, each in enumerate(granules)]
    with pytest.raises(RankError, match=line):
        RankPages.of_processes([os.getpid()], ranks, blocks)
    assert len(pagers) == len(granules)


def test_other_files_and_processes_are_not_reports() -> None:
    gc.collect()
    empty = os.memfd_create(f"{MEMFD}0")
    torn = os.memfd_create(f"{MEMFD}1")
    os.truncate(torn, 4096)
    try:
        with pytest.raises(RankError, match="no report on the KV pages of rank 0, 1"):
            RankPages.of_processes([os.getpid(), 1, 2**22 - 1], 2, BLOCKS)
    finally:
        os.close(empty)
        os.close(torn)


class MapPages(PageBackend):
    """Pages that are few: `free` granules can be mapped, as on a GPU."""

    always_restores = False
    released: Collection[int] = ()

    def __init__(self, granules: Granules = GRANULES) -> None:
        self.bytes_total = granules.blocks * BLOCK_BYTES
        self.released: set[int] = set()
        self.foreign: set[int] = set()
        self.free = self.wanted = self.recalled = 0
        self.lends = False

    @property
    def bytes_returned(self) -> int:
        return len(self.released) * GRANULE_BYTES

    @property
    def owed(self) -> int:
        return self.wanted

    def borrowed(self, granule: int) -> bool:
        return granule in self.foreign

    def release(self, granules: Collection[int]) -> None:
        self.free += len(set(granules) - self.released)
        self.released.update(granules)

    def ready(self, granules: Sequence[int]) -> int:
        return min(self.free, len(granules))

    def restore(self, granules: Collection[int]) -> None:
        if len(granules) > self.free:
            raise DeviceMemoryShort("short")
        self.free -= len(granules)
        self.released.difference_update(granules)

    def recall(self, granules: int) -> None:
        self.recalled = granules

    def poll(self) -> bool:
        return self.lends


class InProcess:
    """Two ranks in this process, with few pages."""

    def __init__(self, mapped: Sequence[int] = (GRANULES.count, GRANULES.count)) -> None:
        gc.collect()  # Reports of an earlier test, in this process, are not to be found.
        self.backends = [MapPages() for _ in mapped]
        for backend, count in zip(self.backends, mapped, strict=True):
            backend.release(range(count, GRANULES.count))
        self.pagers = [
            RankPager(backend, GRANULES, rank, len(mapped))
            for rank, backend in enumerate(self.backends)
        ]
        self.pages = RankPages.of_processes([os.getpid()], len(mapped), BLOCKS)

    def step(self, ranks: Sequence[int] = (0, 1)) -> None:
        operations = self.pages.drain()
        for rank in ranks:
            self.pagers[rank].carry_out(operations)
        with suppress(RankError):
            self.pages.poll()


def test_memory_that_may_be_short_is_mapped_on_all_ranks_before_it_is_used() -> None:
    ranks = InProcess()
    pages, (one, two) = ranks.pages, ranks.backends
    pages.release(range(4, 12))
    ranks.step()
    one.free, two.free = 3, 2
    assert pages.bytes_returned == 8 * GRANULE_BYTES
    assert pages.ready([4, 5, 6, 7]) == 0
    assert pages.bytes_returned == 4 * GRANULE_BYTES, "they may be mapped by now"
    assert pages.ready([4, 5, 6, 7]) == 0, "asked for once"
    with pytest.raises(DeviceMemoryShort):
        pages.restore([4])
    ranks.step()
    assert pages.ready([4, 5, 6, 7]) == 2
    pages.restore([4, 5])
    ranks.step()
    assert [sorted(backend.released) for backend in (one, two)] == [
        [*range(7, 12)],
        [*range(6, 12)],
    ]
    assert pages.bytes_returned == 5 * GRANULE_BYTES
    pages.recall(0)
    ranks.step()
    pages.ready([6])
    pages.recall(0)
    ranks.step()
    assert [sorted(backend.released) for backend in (one, two)] == [[*range(6, 12)]] * 2
    assert pages.ready([6]) == 0


def test_what_was_mapped_for_growth_goes_with_the_next_shrink() -> None:
    ranks = InProcess()
    pages = ranks.pages
    pages.release([4, 5])
    ranks.step()
    pages.ready([4, 5])
    ranks.step()
    pages.release([9])
    ranks.step()
    assert [sorted(backend.released) for backend in ranks.backends] == [[4, 5, 9]] * 2
    assert pages.ready([4]) == 0
    assert pages.bytes_returned == 2 * GRANULE_BYTES


def test_a_start_with_less_memory_is_that_of_the_rank_with_the_least() -> None:
    ranks = InProcess(mapped=(12, 10))
    assert sorted(ranks.pages.released) == [*range(10, 16)]
    ranks.step()
    assert [sorted(backend.released) for backend in ranks.backends] == [[*range(10, 16)]] * 2


def test_loans_are_those_of_any_rank() -> None:
    ranks = InProcess()
    pages, (one, two) = ranks.pages, ranks.backends
    pages.release([3, 4, 5])
    ranks.step()
    two.foreign, two.wanted, one.lends = {3, 4, 5}, 2, True
    assert pages.ready([3, 4, 5]) == 0
    ranks.step()
    assert pages.ready([3, 4, 5]) == 3
    pages.restore([3, 4, 5])
    pages.recall(5)
    ranks.step()
    assert (one.recalled, two.recalled) == (5, 5)
    assert (pages.owed, pages.poll()) == (2, True)
    assert [granule for granule in range(16) if pages.borrowed(granule)] == [3, 4, 5]
    pages.release([4])
    assert pages.owed == 1, "what is on its way is not owed twice"
    two.foreign, two.wanted, one.lends = {3, 5}, 1, False
    ranks.step()
    assert (pages.owed, pages.borrowed(4), pages.poll()) == (1, False, False)


class Disturbed(InProcess):
    """Random calls, steps that reach a rank late, and pages that come and go by themselves."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.held: set[int] = set()
        self.late: list[list[Sequence[Operation]]] = [[], []]

    def shrink(self) -> None:
        mapped = [granule for granule in range(1, 16) if granule not in self.held]
        going = self.rng.sample(mapped, self.rng.randint(0, len(mapped)))
        self.held.update(going)
        self.pages.release(going)

    def grow(self) -> None:
        plan = sorted(self.held)[: self.rng.randint(1, 6)]
        back = plan[: self.pages.ready(plan)]
        self.pages.restore(back)
        self.held.difference_update(back)
        for backend in self.backends:
            assert not backend.released.intersection(back), "handed out, and without pages"

    def recall(self) -> None:
        self.pages.recall(self.rng.choice([0, 0, 3]))

    def others(self) -> None:
        for backend in self.backends:
            backend.free = self.rng.randrange(16)

    def some_steps(self) -> None:
        operations = self.pages.drain()
        for rank, queue in enumerate(self.late):
            queue.append(operations)
            if self.rng.random() < 0.6:
                for each in queue:
                    self.pagers[rank].carry_out(each)
                queue.clear()


@pytest.mark.parametrize("seed", range(20))
def test_no_page_counts_as_returned_that_any_rank_has(seed: int) -> None:
    ranks = Disturbed(seed)
    for _ in range(300):
        ranks.rng.choice([ranks.shrink, ranks.grow, ranks.grow, ranks.recall, ranks.others])()
        ranks.some_steps()
        least = min(backend.bytes_returned for backend in ranks.backends)
        assert ranks.pages.bytes_returned <= min(least, len(ranks.held) * GRANULE_BYTES)


KILLS = 240
POINTS = 8


@pytest.fixture
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def life(ranks: Engine, victim: int) -> Iterator[str]:
    """Take pages and give them back; each yield is a point at which the victim may be killed."""
    pages, it, other = ranks.pages, ranks.ranks[victim], ranks.ranks[1 - victim]
    yield "before any operation"
    pages.release([1, 2, 3])
    yield "operations are decided, and not sent"
    operations = pages.drain()
    other.begin(operations)
    yield "sent to the other rank"
    it.begin(operations)
    yield "sent to both, and not answered"
    other.end()
    yield "answered by the other rank"
    it.end()
    assert (pages.poll(), pages.bytes_returned) == (False, 3 * GRANULE_BYTES)
    yield "answered by both"
    pages.restore([2])
    yield "restored, and not sent"
    operations = pages.drain()
    for rank in ranks.ranks:
        rank.begin(operations)
    yield "restored and sent"


@pytest.mark.usefixtures("_nothing_is_left")
@pytest.mark.parametrize("number", range(KILLS // POINTS))
def test_a_killed_rank_takes_nothing_with_it(number: int) -> None:
    """At each point: nobody waits, no more counts than all ranks reported, nothing is left."""
    victim = number % 2
    for point in range(POINTS):
        with engine() as ranks:
            where = list(islice(life(ranks, victim), point + 1))
            ranks.ranks[victim].kill()
            began_s, pages = time.monotonic(), ranks.pages
            pages.poll()
            before = pages.bytes_returned
            assert before <= (3 if point >= 3 else 0) * GRANULE_BYTES, where[-1]
            pages.release([6])
            pages.drain()
            assert (pages.poll(), pages.bytes_returned) == (True, before)
            assert time.monotonic() - began_s < 1.0
            with pytest.raises(RankError, match=f"rank {victim}"):
                RankPages.of_processes(ranks.pids, 2, BLOCKS)


def test_an_operation_says_what_it_is() -> None:
    pages: Any = InProcess().pages
    pages.release([3])
    (operation,) = pages.drain()
    assert operation == Operation(1, RankCall.RELEASE, (3,))
    assert pages.drain() == ()
