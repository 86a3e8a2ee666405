"""Background tasks that die: started again, or the process hears of it."""

import asyncio
from collections.abc import Awaitable, Callable

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

    def __init__(self, *ends: Exception | None, each_s: float = 0.0) -> None:
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


def virtually(case: Callable[[Background, list[dict[str, object]]], Awaitable[None]]) -> None:
    async def run() -> None:
        events: list[dict[str, object]] = []
        background = Background(lambda event, **fields: events.append({"event": event, **fields}))
        try:
            await case(background, events)
        finally:
            await background.close()

    run_virtually(run())


def test_a_task_that_raises_is_started_again_and_said() -> None:
    async def case(background: Background, events: list[dict[str, object]]) -> None:
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

    virtually(case)


def test_one_that_dies_again_and_again_ends_the_process_with_a_line() -> None:
    async def case(background: Background, events: list[dict[str, object]]) -> None:
        work = Work(*[KeyError("replica")] * 50)
        background.start("table", work)
        async with asyncio.timeout(30):
            with pytest.raises(TaskDiedError, match=r"^table ended \(KeyError: 'replica'"):
                await background.failed()
        assert len(work.began_s) == RESTARTS + 1
        assert background.troubles()[0].startswith("task table is down: KeyError")
        assert background.running() == {"table": False}

    virtually(case)


def test_what_an_operator_can_mend_is_said_as_it_is() -> None:
    async def case(background: Background, events: list[dict[str, object]]) -> None:
        background.start("tick", Work(ConfigError("no room in the store")), restarts=0)
        async with asyncio.timeout(30):
            with pytest.raises(ConfigError, match=r"^no room in the store$"):
                await background.failed()

    virtually(case)


def test_pauses_grow_to_a_bound_where_a_task_is_started_again_for_ever() -> None:
    async def case(background: Background, events: list[dict[str, object]]) -> None:
        work = Work(*[OSError("down")] * 50)
        background.start("session", work, restarts=None)
        await asyncio.sleep(600)
        assert work.ends == []
        pauses = [b - a for a, b in zip(work.began_s, work.began_s[1:], strict=False)]
        assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
        assert pauses[-1] == pytest.approx(MAX_PAUSE_S)

    virtually(case)


def test_seldom_deaths_are_no_reason_to_give_up() -> None:
    async def case(background: Background, events: list[dict[str, object]]) -> None:
        work = Work(*[OSError("once a while")] * (3 * RESTARTS), each_s=STEADY_S)
        background.start("session", work)
        await asyncio.sleep(4 * RESTARTS * STEADY_S)
        assert background.running() == {"session": True}
        assert len(events) == 3 * RESTARTS

    virtually(case)


def test_a_task_that_cancels_itself_is_noticed_as_well() -> None:
    async def case(background: Background, events: list[dict[str, object]]) -> None:
        ends = [True]

        async def work() -> None:
            if ends:
                ends.pop()
                raise asyncio.CancelledError
            await asyncio.Event().wait()

        background.start("watch", work)
        await asyncio.sleep(1)
        assert background.restarted() == {"watch": 1}
        assert len(events) == 1

    virtually(case)


def test_a_task_may_end_with_its_process() -> None:
    async def case(background: Background, events: list[dict[str, object]]) -> None:
        work = Work(None, each_s=1)
        background.start("engine", work)
        background.let_end()
        await asyncio.sleep(10)
        assert len(work.began_s) == 1
        assert events == []

    virtually(case)


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
