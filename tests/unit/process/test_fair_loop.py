"""A loop that is never idle keeps no other thread from running."""

import asyncio
import threading
import time

from rose.process.background_tasks import fair_loop

WAKES_S = 0.001
MOST_HOLD_S = 0.1
BUSY_S = 0.3
TASKS = 16
ROUNDS = 5


def longest_wait() -> float:
    """Seconds of CPU time that a busy loop spends at most before another thread gets a turn."""
    ended = threading.Event()
    longest_s = 0.0

    def wake() -> None:
        nonlocal longest_s
        spent_s = time.process_time()
        while not ended.is_set():
            time.sleep(WAKES_S)
            before_s, spent_s = spent_s, time.process_time()
            longest_s = max(longest_s, spent_s - before_s)

    async def spin() -> None:
        until_s = time.monotonic() + BUSY_S
        while time.monotonic() < until_s:  # noqa: ASYNC110 - to keep the loop busy
            await asyncio.sleep(0)

    async def keep_busy() -> None:
        await asyncio.gather(*(spin() for _ in range(TASKS)))

    thread = threading.Thread(target=wake)
    thread.start()
    with asyncio.Runner(loop_factory=fair_loop) as runner:
        runner.run(keep_busy())
    ended.set()
    thread.join()
    return longest_s


def test_a_busy_loop_lets_other_threads_run() -> None:
    """The best of a few counts: a thread may wait for a core as well."""
    assert any(longest_wait() < MOST_HOLD_S for _ in range(ROUNDS))


def test_timers_and_sockets_are_served_in_time_by_a_busy_loop() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        spinning = True

        async def spin() -> None:
            while spinning:  # noqa: ASYNC110 - to keep the loop busy
                await asyncio.sleep(0)

        task = loop.create_task(spin())
        started_s = time.monotonic()
        await asyncio.sleep(0.05)
        late_s = time.monotonic() - started_s
        spinning = False
        await task
        return late_s

    with asyncio.Runner(loop_factory=fair_loop) as runner:
        assert any(0.05 <= runner.run(main()) < 0.5 for _ in range(ROUNDS))
