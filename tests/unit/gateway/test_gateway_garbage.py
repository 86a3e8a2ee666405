"""The gateway's collections: cycles of unknown origin go while turns run, none takes long."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from rose.gateway import event_loop
from rose.gateway.event_loop import collect_in_small_steps, look_through_old
from tests.harness.waiting import PATIENCE_S


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection from here on."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


async def test_new_cycles_go_long_before_they_are_many_and_without_a_look_at_the_whole_heap(
    collections: list[int],
) -> None:
    collecting = asyncio.create_task(collect_in_small_steps(old_s=60))
    await asyncio.sleep(0)
    collections.clear()
    old = [_Cycle() for _ in range(100)]
    gone = weakref.ref(_Cycle())
    left = [weakref.ref(_Cycle()) for _ in range(3 * event_loop.NEW)]
    alive = sum(each() is not None for each in left)
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert gone() is None
    assert alive <= event_loop.NEW
    assert set(collections) == {0}
    assert len(old) == 100


async def test_what_is_new_is_looked_through_by_the_clock_where_nothing_grows() -> None:
    collecting = asyncio.create_task(collect_in_small_steps(old_s=60))
    await asyncio.sleep(0)
    live = [_Cycle() for _ in range(100)]
    new = set(map(id, gc.get_objects(generation=0)))
    assert id(live[0]) in new
    async with asyncio.timeout(PATIENCE_S):
        while id(live[0]) in map(id, gc.get_objects(generation=0)):  # noqa: ASYNC110
            await asyncio.sleep(event_loop.NEW_S)
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)


async def test_cycles_that_grew_old_go_at_the_next_look() -> None:
    collecting = asyncio.create_task(collect_in_small_steps(old_s=0.01))
    await asyncio.sleep(0)
    old = _Cycle()
    left = weakref.ref(old)
    gc.collect(0)
    gc.collect(1)
    assert left() is not None
    del old
    async with asyncio.timeout(PATIENCE_S):
        while left() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)


@pytest.mark.parametrize(
    ("little", "too_many", "generations"),
    [(10**6, 10**7, [2]), (10, 10**7, []), (10, 50, [2])],
    ids=["little", "much", "too many"],
)
def test_much_that_is_old_is_left_alone_until_it_is_too_much(
    little: int,
    too_many: int,
    generations: list[int],
    collections: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "LITTLE", little)
    monkeypatch.setattr(event_loop, "TOO_MANY", too_many)
    gc.freeze()  # What tests that came before left; it stays so: to look through it takes long.
    kept = [_Cycle() for _ in range(100)]
    gc.collect(0)
    collections.clear()
    look_through_old()
    assert collections == generations
    assert len(kept) == 100


@pytest.mark.parametrize("frozen", [False, True])
async def test_the_collector_is_as_it_was_in_the_end(frozen: bool) -> None:
    gc.unfreeze()
    if frozen:
        gc.freeze()
    before = gc.get_threshold()
    collecting = asyncio.create_task(collect_in_small_steps())
    await asyncio.sleep(0)
    assert gc.get_threshold()[0] == event_loop.NEW
    assert gc.get_freeze_count() > 0
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert gc.get_threshold() == before
    assert (gc.get_freeze_count() > 0) == frozen
