"""Event loop of the gateway: collections in small steps, and the lag that anything else costs."""

import asyncio
import gc
import io
import json
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from rose.gateway import event_loop
from rose.gateway.event_loop import WINDOW_S, LoopLag, collect_in_small_steps, look_through_old
from tests.harness.waiting import HandClock
from tests.unit.gateway.gateway_cases import calling, until
from tests.unit.gateway.wire_cases import get


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


@asynccontextmanager
async def collecting(**settings: float) -> AsyncIterator[None]:
    task = asyncio.create_task(collect_in_small_steps(**settings))
    await asyncio.sleep(0)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_new_cycles_go_long_before_they_are_many_and_without_a_look_at_the_whole_heap(
    collections: list[int],
) -> None:
    async with collecting(old_s=60):
        collections.clear()
        old = [_Cycle() for _ in range(100)]
        gone = weakref.ref(_Cycle())
        left = [weakref.ref(_Cycle()) for _ in range(3 * event_loop.NEW)]
        alive = sum(each() is not None for each in left)
    assert gone() is None
    assert alive <= event_loop.NEW
    assert set(collections) == {0}
    assert len(old) == 100


async def test_what_is_new_is_looked_through_by_the_clock_where_nothing_grows() -> None:
    async with collecting(old_s=60):
        live = [_Cycle() for _ in range(100)]
        assert id(live[0]) in map(id, gc.get_objects(generation=0))
        await until(lambda: id(live[0]) not in map(id, gc.get_objects(generation=0)))


async def test_cycles_that_grew_old_go_at_the_next_look() -> None:
    async with collecting(old_s=0.01):
        old = _Cycle()
        left = weakref.ref(old)
        gc.collect(0)
        gc.collect(1)
        assert left() is not None
        del old
        await until(lambda: left() is None)


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
    async with collecting():
        assert gc.get_threshold()[0] == event_loop.NEW
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert (gc.get_freeze_count() > 0) == frozen


HELD_S = 0.05
MOST_BUSY_S = 0.1


def test_the_worst_lag_is_told_for_some_seconds_and_then_forgotten() -> None:
    clock = HandClock()
    lag = LoopLag(clock)
    lag.note(0.3, 0.1)
    lag.note(0.02, 0.02)
    assert (lag.max_s, lag.busy_max_s) == (0.3, 0.1)
    clock.now_s += WINDOW_S - 1
    lag.note(0.01, 0.01)
    assert lag.max_s == 0.3
    clock.now_s += 2
    assert (lag.max_s, lag.busy_max_s) == (0.01, 0.01)
    clock.now_s += WINDOW_S
    assert lag.max_s == 0.0


def test_seconds_that_are_over_take_no_memory() -> None:
    clock = HandClock()
    lag = LoopLag(clock)
    for _ in range(100):
        clock.now_s += 0.5
        lag.note(0.001, 0.0)
    assert len(lag._seconds) <= WINDOW_S + 1


def test_all_lags_since_start_are_a_histogram() -> None:
    lag = LoopLag(HandClock())
    for each_s in (0.0, 0.002, 0.06, 9.0):
        lag.note(each_s, 0.0)
    lines = lag.exposition()
    assert lines[0].startswith("# HELP rose_gateway_loop_lag_seconds ")
    assert lines[1] == "# TYPE rose_gateway_loop_lag_seconds histogram"
    for told in (
        'bucket{le="0.001"} 1',
        'bucket{le="0.0025"} 2',
        'bucket{le="0.05"} 2',
        'bucket{le="0.1"} 3',
        'bucket{le="2.5"} 3',
        'bucket{le="+Inf"} 4',
        "sum 9.062000",
        "count 4",
    ):
        assert f"rose_gateway_loop_lag_seconds_{told}" in lines


async def watched(lag: LoopLag, hold_up: Callable[[], None]) -> LoopLag:
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    hold_up()
    await until(lambda: lag.max_s > 0)
    watching.cancel()
    return lag


async def test_a_step_that_holds_the_loop_up_is_measured() -> None:
    lag = await watched(LoopLag(), lambda: time.sleep(HELD_S))
    # The loop slept: for most of that time it had no processor.
    assert lag.max_s >= HELD_S - 0.011
    assert lag.busy_max_s <= lag.max_s


async def test_the_processor_time_of_a_lag_is_told_apart() -> None:
    clock, worked = HandClock(), HandClock()

    def hold_up() -> None:
        clock.now_s += 0.5
        worked.now_s += 0.2

    lag = await watched(LoopLag(clock, worked), hold_up)
    assert lag.max_s == pytest.approx(0.49)
    assert lag.busy_max_s == pytest.approx(0.2)


async def test_a_gateway_tells_how_late_its_loop_was() -> None:
    async with calling() as (_, session):
        time.sleep(HELD_S)  # noqa: ASYNC251 - the loop is to be held up
        told: dict[str, float] = {"loop_lag_max_s": 0.0}
        while not told["loop_lag_max_s"]:
            told = await get(session, "/rose/v1/stats")
        text = await get(session, "/metrics")
    assert 0 <= told["loop_busy_max_s"] <= told["loop_lag_max_s"]
    assert "rose_gateway_loop_lag_seconds_count" in text


async def test_the_largest_request_that_is_accepted_lets_others_go_on() -> None:
    body = {"input_ids": [[7] * 16_000] * 60, "sampling_params": {"max_new_tokens": 1}}
    data = json.dumps(body, separators=(",", ":")).encode()
    async with calling(queue_wait_s=0.3, version_wait_s=0.3) as (_, session):
        async with session.post("/generate", data=io.BytesIO(data)) as answer:
            said = await answer.text()
        told = await get(session, "/rose/v1/stats")
    assert "no replica" in said
    # Processor time between two steps of the loop: what others do with the machine is not in it.
    assert 0 < told["loop_busy_max_s"] < MOST_BUSY_S
