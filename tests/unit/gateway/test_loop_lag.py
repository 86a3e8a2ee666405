"""Lag of the gateway's event loop: how long, and whether the loop itself caused it."""

import asyncio
import io
import json
import time

import pytest
from gateway_cases import gateway_with

from rose.gateway.event_loop import WINDOW_S, LoopLag

HELD_S = 0.05
MOST_BUSY_S = 0.1


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_worst_lag_is_told_for_some_seconds_and_then_forgotten() -> None:
    clock = Clock()
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
    clock = Clock()
    lag = LoopLag(clock)
    for _ in range(100):
        clock.now_s += 0.5
        lag.note(0.001, 0.0)
    assert len(lag._seconds) <= WINDOW_S + 1


def test_all_lags_since_start_are_a_histogram() -> None:
    lag = LoopLag(Clock())
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


async def watched(hold_up: float) -> LoopLag:
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    time.sleep(hold_up)  # noqa: ASYNC251 - the loop is to be held up
    while not lag.max_s:  # noqa: ASYNC110 - there is nothing else to wait for
        await asyncio.sleep(0.001)
    watching.cancel()
    return lag


def test_a_step_that_holds_the_loop_up_is_measured() -> None:
    lag = asyncio.run(watched(HELD_S))
    # The loop slept: for most of that time it had no processor.
    assert lag.max_s >= HELD_S - 0.011
    assert lag.busy_max_s <= lag.max_s


def test_the_processor_time_of_a_lag_is_told_apart() -> None:
    clock, worked = Clock(), Clock()

    async def late() -> LoopLag:
        lag = LoopLag(clock, worked)
        watching = asyncio.create_task(lag.watch())
        await asyncio.sleep(0)
        clock.now_s += 0.5
        worked.now_s += 0.2
        while not lag.max_s:  # noqa: ASYNC110 - the clock is its own
            await asyncio.sleep(0.001)
        watching.cancel()
        return lag

    lag = asyncio.run(late())
    assert lag.max_s == pytest.approx(0.49)
    assert lag.busy_max_s == pytest.approx(0.2)


async def test_a_gateway_tells_how_late_its_loop_was() -> None:
    import aiohttp

    async with gateway_with() as gateway, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{gateway.port}"
        time.sleep(HELD_S)  # noqa: ASYNC251 - the loop is to be held up
        told: dict[str, float] = {"loop_lag_max_s": 0.0}
        while not told["loop_lag_max_s"]:
            async with session.get(f"{url}/rose/v1/stats") as answer:
                told = await answer.json()
        async with session.get(f"{url}/metrics") as answer:
            text = await answer.text()
    assert 0 <= told["loop_busy_max_s"] <= told["loop_lag_max_s"]
    assert "rose_gateway_loop_lag_seconds_count" in text


async def test_the_largest_request_that_is_accepted_lets_others_go_on() -> None:
    import aiohttp

    prompts = [[7] * 16_000] * 60
    body = json.dumps({"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}})
    body = body.replace(" ", "")
    async with (
        gateway_with(queue_wait_s=0.3, version_wait_s=0.3) as gateway,
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{gateway.port}"
        async with session.post(f"{url}/generate", data=io.BytesIO(body.encode())) as answer:
            said = await answer.text()
        async with session.get(f"{url}/rose/v1/stats") as answer:
            told = await answer.json()
    assert "no replica" in said
    # Processor time between two steps of the loop: what others do with the machine is not in it.
    assert 0 < told["loop_busy_max_s"] < MOST_BUSY_S
