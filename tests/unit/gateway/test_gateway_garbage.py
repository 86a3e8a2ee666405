"""The collector is told to look at young objects only: `rose.gateway.main` says why it may."""

import gc
from collections import Counter

from gateway_cases import base_url, entry, gateway_with
from standin_replica import StandInReplica

from rose.client import RolloutClient, Sampling

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
