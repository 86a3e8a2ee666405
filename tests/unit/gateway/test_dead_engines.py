"""Dead engine keeps receiving traffic: what a gateway sends there before its table says so."""

import asyncio
import time

import pytest
from gateway_cases import calling, entry, until
from wire_cases import VLLM, ask, vllm_body

from elastic_scheduler import End
from rose.gateway import server
from rose.gateway.replicas.dispatcher import REST_S
from tests.fakes.replica import StandInReplica

FOR_S = 1.2


async def test_a_dead_engine_is_tried_once_in_a_while_and_costs_no_turn() -> None:
    """A dead engine looks idle, fast and healthy until the scheduler notices."""
    async with StandInReplica() as dead, StandInReplica(delay_s=0.001) as living:
        rows = entry(dead, "own-dead", decode_tok_s=9e5), entry(living, "own-live")
        async with calling(*rows) as (gw, http):
            assert (await ask(http, VLLM, vllm_body(2)))[0] == 200
            assert len(dead.requests) == 1
            dead.kill()
            stats, turns = gw.stats, 0
            until_s = time.monotonic() + FOR_S
            began_s = time.monotonic()
            while time.monotonic() < until_s:
                status, answer, _ = await ask(http, VLLM, vllm_body(2))
                assert (status, answer["choices"][0]["token_ids"]) == (200, [101, 102])
                turns += 1
            tries = stats.ends[End.BROKEN.value]
            assert 1 <= tries <= 2 + (time.monotonic() - began_s) / REST_S[End.BROKEN]
            assert turns > 4 * tries
            # From the moment that the table says so there is none at all.
            gw.set_table((entry(dead, "own-dead", healthy=False, decode_tok_s=9e5), rows[1]))
            await asyncio.sleep(REST_S[End.BROKEN])
            answers = await asyncio.gather(*(ask(http, VLLM, vllm_body(2)) for _ in range(20)))
            assert all(status == 200 for status, _, _ in answers)
            assert stats.ends[End.BROKEN.value] == tries
    assert len(dead.requests) == 1


async def test_an_engine_that_answers_and_makes_no_tokens_gets_no_turn_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its API process lives on; its engine does not."""
    # Time passes for the gateway when this test says so: a slow machine is no dead engine.
    monkeypatch.setattr(server, "SWEEP_S", 3_600.0)
    stall_s = 0.1
    async with StandInReplica() as hung, StandInReplica() as living:
        hung.hang_after = 0
        rows = entry(hung, "own-hung", decode_tok_s=9e5), entry(living, "own-live")
        async with calling(*rows, stall_s=stall_s) as (gw, http):
            dispatcher, now_s = gw.dispatcher, asyncio.get_running_loop().time()
            monkeypatch.setattr(dispatcher, "_clock", lambda: now_s)
            turns = [asyncio.create_task(ask(http, VLLM, vllm_body(2))) for _ in range(10)]
            await until(lambda: sum(turn.done() for turn in turns) + hung.live == len(turns))
            assert hung.live, "it looks the faster one"
            now_s += 2 * stall_s
            dispatcher.sweep()
            answers = await asyncio.gather(*turns)
            assert all(status == 200 for status, _, _ in answers)
            await until(lambda: hung.live == 0)
            assert len(hung.requests) <= 10
            sent = len(hung.requests)
            assert (await ask(http, VLLM, vllm_body(2)))[0] == 200
    assert len(hung.requests) == sent, "a moment later it still rests"
    assert all(answer["attempts"] <= 2 for _, answer, _ in answers)


async def test_a_turn_at_which_two_engines_ended_is_not_sent_to_a_third() -> None:
    """Before its first token: what ends engines may be the turn itself."""
    async with StandInReplica() as one, StandInReplica() as two, StandInReplica() as third:
        rows = entry(one, "a", decode_tok_s=9e5), entry(two, "b", decode_tok_s=9e4)
        one.break_after = two.break_after = 0
        async with calling(*rows, entry(third, "c", decode_tok_s=1.0)) as (_, http):
            status, answer, _ = await ask(http, VLLM, vllm_body(2))
            assert (status, third.requests) == (422, [])
            assert "2 replicas ended before this turn's first token" in answer["error"]["message"]
            one.break_after = two.break_after = 1
            status, answer, _ = await ask(http, VLLM, vllm_body(3))
            assert (status, answer["choices"][0]["token_ids"]) == (200, [101, 102, 103])
