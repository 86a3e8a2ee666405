"""Priority inversion at max sequences: what is less urgent fills no place that others wait for."""

import asyncio
from typing import Any

import aiohttp
from gateway_cases import calling, entry, serving, until
from wire_cases import VLLM, ask, vllm_body

from tests.fakes.replica import StandInReplica

CAP = 2
LOW, HIGH = 7, -7


def order_of(*replicas: StandInReplica) -> list[str]:
    return [asked["request_id"].split(".")[0] for r in replicas for asked in r.requests]


def begin(http: aiohttp.ClientSession, name: str, priority: int, **fields: Any) -> Any:
    body = vllm_body(fields.pop("tokens", 4), request_id=name, priority=priority, **fields)
    return asyncio.create_task(ask(http, VLLM, body))


async def test_a_flood_of_low_priority_turns_does_not_hold_up_one_of_high_priority() -> None:
    async with serving(StandInReplica(delay_s=0.01), row={"max_sequences": CAP}) as (
        replica,
        gw,
        http,
    ):
        turns = [begin(http, f"low-{k}", LOW) for k in range(20)]
        await until(lambda: replica.live == CAP and gw.status().waiting == 18)
        began = len(replica.requests)
        turns.append(begin(http, "high", HIGH))
        await until(lambda: gw.status().waiting == 19)
        # More of them keep coming while a place becomes free: they stand behind it too.
        turns += [begin(http, f"late-{k}", LOW) for k in range(20)]
        answers = await asyncio.gather(*turns)
        assert gw.status().waiting == 0
    assert [status for status, _, _ in answers] == [200] * 41
    assert order_of(replica)[began] == "high"
    assert replica.max_live == CAP
    # The engine is told as well: it orders what it has queued itself.
    assert {asked["priority"] for asked in replica.requests} == {LOW, HIGH}


async def test_turns_of_a_revoked_replica_do_not_pass_one_of_higher_priority() -> None:
    async with StandInReplica(delay_s=0.01) as lost, StandInReplica(delay_s=0.01) as kept:
        lost.hang_after = 2
        rows = entry(lost, "guest-0", max_sequences=3), entry(kept, "own-0", max_sequences=1)
        async with calling(rows[0], stall_s=9) as (gw, http):
            turns = [begin(http, f"low-{k}", LOW) for k in range(3)]
            await until(lambda: lost.live == 3)
            turns.append(begin(http, "high", HIGH))
            turns.append(begin(http, "new", LOW))
            await until(lambda: gw.status().waiting == 2)
            gw.set_table(())
            await until(lambda: gw.status().waiting == 5)
            gw.set_table(rows[1:])
            answers = await asyncio.gather(*turns)
    assert [status for status, _, _ in answers] == [200] * 5
    order = order_of(kept)
    # Among turns of equal priority those that had begun before go first.
    assert (order[0], order[-1]) == ("high", "new")
    assert sorted(order[1:4]) == ["low-0", "low-1", "low-2"]


async def test_what_is_urgent_and_cannot_run_here_holds_up_nobody_and_is_not_passed_elsewhere() -> (
    None
):
    """A free place of another policy version is no use to it; those of its own are."""
    async with StandInReplica(version=1) as old, StandInReplica(version=2, delay_s=0.01) as new:
        rows = entry(old, "own-0", max_sequences=1), entry(new, "own-1", max_sequences=1)
        async with calling(rows[1]) as (gw, http):
            turns = [begin(http, "running", LOW, exact_version=2, tokens=20)]
            await until(lambda: new.live == 1)
            turns += [begin(http, f"low-{k}", LOW) for k in range(6)]
            turns.append(begin(http, "high", HIGH, exact_version=2))
            await until(lambda: gw.status().waiting == 7)
            gw.set_table(rows)
            await asyncio.gather(*turns)
    assert "high" not in order_of(old)
    assert order_of(new)[1] == "high"
