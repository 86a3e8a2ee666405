"""The collector rests while turns run: turns leave nothing for it, and what is left goes later."""

import asyncio
import gc
import weakref
from collections import Counter

from gateway_cases import base_url, entry, gateway_with
from standin_replica import StandInReplica

from rose.client import RolloutClient, Sampling
from rose.gateway.garbage import collect_when_idle

TURNS = 25
TEN = Sampling(max_tokens=10)


async def test_turns_leave_no_cycles_behind() -> None:
    async with (
        StandInReplica() as replica,
        gateway_with(entry(replica, "r")) as gateway,
        RolloutClient(base_url(gateway), timeout_s=10) as client,
    ):

        async def turns(name: str) -> None:
            for number in range(TURNS):
                await client.generate([1, 2, 100], TEN, request_id=f"{name}/{number}")
                async with client.stream([1, 2, 100], TEN) as stream:
                    assert [chunk async for chunk in stream]

        await turns("first")
        gc.collect()
        gc.disable()
        try:
            await turns("then")
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = Counter(type(each).__name__ for each in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    # The client's own streams and the stand-in's handlers are in this process too.
    assert all(count < TURNS for count in left.values()), left.most_common(8)


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


async def test_cycles_go_when_no_turn_runs_and_the_collector_comes_back_in_the_end() -> None:
    turns = 1
    collecting = asyncio.create_task(collect_when_idle(lambda: turns, look_s=0.01))
    try:
        await asyncio.sleep(0.05)
        assert not gc.isenabled()
        left = weakref.ref(_Cycle())
        await asyncio.sleep(0.05)
        assert left() is not None, "nobody looks while a turn runs"
        turns = 0
        async with asyncio.timeout(5):
            while left() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
