"""Background tasks that die: started again, or the process hears of it."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.process.background_tasks import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    RESTARTS,
    STEADY_S,
    Background,
    TaskDiedError,
)
from tests.unit.client.virtual_time import run_virtually


class Work:
    """A task that ends as told, once for each entry, and then runs on."""

    def __init__(self, *ends: BaseException | None, each_s: float = 0.0) -> None:
        self.ends = list(ends)
        self.each_s = each_s
        self.began_s: list[float] = []

    async def __call__(self) -> None:
        self.began_s.append(asyncio.get_running_loop().time())
        if not self.ends:
            await asyncio.Event().wait()
        await asyncio.sleep(self.each_s)
        error = self.ends.pop(0)
        if error is not None:
            raise error


Case = Callable[[Background, list[dict[str, object]]], Awaitable[None]]


def virtually(case: Case) -> Callable[[], None]:
    """Make a coroutine a test that waits in virtual time, with a background and its events."""

    async def run() -> None:
        events: list[dict[str, object]] = []
        background = Background(lambda event, **fields: events.append({"event": event, **fields}))
        try:
            async with asyncio.timeout(4 * RESTARTS * STEADY_S + 1):
                await case(background, events)
        finally:
            await background.close()

    return lambda: run_virtually(run())


@virtually
async def test_a_task_that_raises_is_started_again_and_said(background: Any, events: Any) -> None:
    work = Work(OSError(28, "No space left on device"), None)
    background.start("sweep", work)
    await asyncio.sleep(1)
    assert len(work.began_s) == 3
    assert [event["event"] for event in events] == ["task_died"] * 2
    assert str(events[0]["message"]).startswith("OSError: [Errno 28] No space left on device, ")
    assert events[1]["message"] == "it returned"
    assert background.restarted() == {"sweep": 2}
    assert background.running() == {"sweep": True}
    assert background.troubles() == ["task sweep was started again: it returned"]
    await asyncio.sleep(STEADY_S)
    assert background.troubles() == []


@virtually
async def test_one_that_dies_again_and_again_ends_the_process_with_a_line(
    background: Any, events: Any
) -> None:
    work = Work(*[KeyError("replica")] * 50)
    background.start("table", work)
    with pytest.raises(TaskDiedError, match=r"^table ended \(KeyError: 'replica'"):
        await background.failed()
    assert len(work.began_s) == RESTARTS + 1
    assert background.troubles()[0].startswith("task table is down: KeyError")
    assert background.running() == {"table": False}


@virtually
async def test_what_an_operator_can_mend_is_said_as_it_is(background: Any, events: Any) -> None:
    background.start("tick", Work(ConfigError("no room in the store")), restarts=0)
    with pytest.raises(ConfigError, match=r"^no room in the store$"):
        await background.failed()


@virtually
async def test_pauses_grow_to_a_bound_where_a_task_is_started_again_for_ever(
    background: Any, events: Any
) -> None:
    work = Work(*[OSError("down")] * 50)
    background.start("session", work, restarts=None)
    await asyncio.sleep(600)
    assert work.ends == []
    pauses = [b - a for a, b in pairwise(work.began_s)]
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S)


@virtually
async def test_seldom_deaths_are_no_reason_to_give_up(background: Any, events: Any) -> None:
    work = Work(*[OSError("once a while")] * (3 * RESTARTS), each_s=STEADY_S)
    background.start("session", work)
    await asyncio.sleep(4 * RESTARTS * STEADY_S)
    assert background.running() == {"session": True}
    assert len(events) == 3 * RESTARTS


@virtually
async def test_a_task_that_cancels_itself_is_noticed_as_well(background: Any, events: Any) -> None:
    background.start("watch", Work(asyncio.CancelledError()))
    await asyncio.sleep(1)
    assert background.restarted() == {"watch": 1}
    assert len(events) == 1


@virtually
async def test_a_task_may_end_with_its_process(background: Any, events: Any) -> None:
    work = Work(None, each_s=1)
    background.start("engine", work)
    background.let_end()
    await asyncio.sleep(10)
    assert len(work.began_s) == 1
    assert events == []


def test_a_listener_that_raises_leaves_no_task_without_care() -> None:
    def deaf(event: str, **fields: object) -> None:
        raise KeyError("a fault of the program")

    async def run() -> None:
        background = Background(deaf)
        background.start("sweep", Work(OSError("down")))
        async with asyncio.timeout(30):
            with pytest.raises(TaskDiedError, match=r"^sweep ended \(KeyError"):
                await background.failed()
        await background.close()

    run_virtually(run())
