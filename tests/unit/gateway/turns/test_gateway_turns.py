"""A turn as its client gets it: whole, with its versions, wherever its replicas end."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from elastic_scheduler import End
from rose.client import RolloutClient, Sampling
from rose.gateway import server
from rose.gateway.replicas.dispatcher import REST_S
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import (
    base_url,
    begin,
    calling,
    entry,
    failing_over,
    gateway_with,
    serving,
    until,
)
from tests.unit.gateway.wire_cases import VLLM, ask, tokens_of, vllm_body

PROMPT = [1, 2, 100]
COUNT = tuple(range(101, 111))
TEN = Sampling(max_tokens=10, min_tokens=7)


async def one_turn(gateway: Any, name: Any = "r1", **kw: Any) -> Any:
    async with RolloutClient(base_url(gateway), timeout_s=10) as client:
        return await client.generate(PROMPT, TEN, request_id=name, session_id="s", **kw)


def assert_whole(turn: Any) -> None:
    assert turn.token_ids == COUNT
    assert turn.logprobs == tuple(-token / 1000 for token in COUNT)
    for spans in (turn.versions, turn.segments):
        edges = [span[-2:] for span in spans]
        assert edges[0][0] == 0
        assert edges[-1][1] == len(COUNT)
        assert all(a[1] == b[0] for a, b in pairwise(edges))


async def test_an_untroubled_turn_has_one_segment_and_one_version() -> None:
    async with serving(StandInReplica(version=3), "ded-0") as (_, gw, _):
        turn = await one_turn(gw)
    assert_whole(turn)
    assert turn.versions == ((3, 0, 10),)
    assert turn.segments == (("ded-0", "dedicated", 0, 10),)
    assert (turn.attempts, turn.finish_reason) == (1, "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_on_kept_kv_say_how_old_it_is(stream: bool) -> None:
    chunks: list[Any] = []
    async with serving(StandInReplica(version=3), "ded-0") as (replica, gw, _):
        replica.update_at = 4
        if stream:
            async with (
                RolloutClient(base_url(gw), timeout_s=10) as client,
                client.stream(PROMPT, TEN, request_id="streamed") as parts,
            ):
                chunks = [chunk async for chunk in parts]
                turn = parts.turn
        else:
            turn = await one_turn(gw)
    assert_whole(turn)
    assert turn.versions == ((3, 0, 4), (4, 4, 10))
    assert turn.oldest_versions == ((3, 4, 10),)
    assert turn.oldest_version == 3
    assert bool(chunks) == stream
    for chunk in chunks:
        assert (chunk.version, chunk.oldest_version) == ((4, 3) if chunk.start >= 4 else (3, None))


async def test_kv_made_anew_elsewhere_is_as_young_as_its_tokens() -> None:
    async with failing_over(StandInReplica(3), StandInReplica(4)) as (old, _, gw, _):
        old.update_at, old.revoke_after = 2, 5
        turn = await one_turn(gw)
    assert_whole(turn)
    assert turn.versions == ((3, 0, 2), (4, 2, 10))
    assert turn.oldest_versions == ((3, 2, 5),)


@pytest.mark.parametrize(
    ("fault", "value", "kept"),
    [
        ("revoke_after", 4, 4),
        ("break_after", 4, 4),
        ("hang_after", 4, 4),
        ("draining", True, 0),
    ],
)
async def test_a_turn_whose_replica_fails_goes_on_elsewhere_with_prompt_and_journal(
    fault: str, value: Any, kept: int
) -> None:
    stall_s = 0.05 if fault == "hang_after" else 9.0
    replicas = StandInReplica(1), StandInReplica(2)
    async with failing_over(*replicas, stall_s=stall_s) as (guest, own, gw, _):
        setattr(guest, fault, value)
        turn = await one_turn(gw)
    assert_whole(turn)
    parts = (("guest-0", "guest", 0, 4), ("own-0", "dedicated", 4, 10))
    assert turn.segments == (parts if kept else (("own-0", "dedicated", 0, 10),))
    assert turn.versions == (((1, 0, 4), (2, 4, 10)) if kept else ((2, 0, 10),))
    assert (turn.attempts, len(guest.requests)) == (2, 1)
    (asked,) = own.requests
    assert asked["token_ids"] == [*PROMPT, *COUNT[:kept]]
    assert asked["sampling"]["max_tokens"] == 10 - kept
    assert asked["sampling"]["min_tokens"] == 7 - kept
    assert asked["request_id"] != guest.requests[0]["request_id"]
    assert guest.cancelled == (fault == "hang_after")


async def test_a_turn_complete_but_for_its_last_line_is_not_generated_again() -> None:
    sampling = Sampling(max_tokens=20, stop_token_ids=(109,))
    async with serving() as (guest, gw, _), RolloutClient(base_url(gw), timeout_s=10) as client:
        guest.break_after = 9
        turn = await client.generate(PROMPT, sampling, request_id="r", session_id="s")
    assert turn.token_ids == COUNT[:9]
    assert turn.finish_reason == "stop"
    assert len(guest.requests) == 1


async def test_turns_wait_while_nobody_is_leased() -> None:
    async with StandInReplica() as guest, gateway_with() as gw:
        turn = asyncio.create_task(one_turn(gw))
        await until(lambda: gw.status().waiting > 0)
        gw.set_table((entry(guest, "guest-0", leased=False),))
        assert gw.status().waiting == 1
        gw.set_table((entry(guest, "guest-0"),))
        assert_whole(await turn)


async def test_a_replica_never_has_more_turns_than_its_cap() -> None:
    async with serving(StandInReplica(delay_s=0.001), row={"max_sequences": 3}) as (guest, gw, _):
        for turn in await asyncio.gather(*(one_turn(gw, f"r{i}") for i in range(20))):
            assert_whole(turn)
    assert guest.max_live == 3


async def test_min_version_waits_for_the_version_to_arrive() -> None:
    async with serving(StandInReplica(version=1)) as (guest, gw, _):
        turn = asyncio.create_task(one_turn(gw, min_version=2))
        await until(lambda: gw.status().waiting > 0)
        guest.version = 2
        gw.set_table((entry(guest, "guest-0"),))
        assert (await turn).versions == ((2, 0, 10),)


async def test_tokens_older_than_the_table_says_are_never_journaled() -> None:
    async with failing_over(StandInReplica(1), StandInReplica(2)) as (liar, honest, gw, _):
        rows = entry(liar, "guest-0", policy_version=2, decode_tok_s=9e5), entry(honest, "own-0")
        gw.set_table(rows)
        turn = await one_turn(gw, min_version=2)
    assert turn.versions == ((2, 0, 10),)
    assert turn.attempts == 2


# ---- engines that are dead ----


async def test_a_dead_engine_is_tried_once_in_a_while_and_costs_no_turn() -> None:
    """A dead engine looks idle, fast and healthy until the scheduler notices."""
    async with failing_over(second=StandInReplica(delay_s=0.001)) as (dead, living, gw, http):
        assert (await ask(http, VLLM, vllm_body(2)))[0] == 200
        assert len(dead.requests) == 1
        dead.kill()
        stats, turns = gw.stats, 0
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while clock() < began_s + 2 * REST_S[End.BROKEN]:
            status, answer, _ = await ask(http, VLLM, vllm_body(2))
            assert (status, tokens_of(answer)) == (200, [101, 102])
            turns += 1
        tries = stats.ends[End.BROKEN.value]
        assert 1 <= tries <= 2 + (clock() - began_s) / REST_S[End.BROKEN]
        assert turns > 4 * tries
        # From the moment that the table says so there is none at all.
        unhealthy = entry(dead, "guest-0", healthy=False, decode_tok_s=9e5)
        gw.set_table((unhealthy, entry(living, "own-0")))
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
    async with failing_over(stall_s=stall_s) as (hung, _, gw, http):
        hung.hang_after = 0
        dispatcher, now_s = gw.dispatcher, asyncio.get_running_loop().time()
        monkeypatch.setattr(dispatcher, "_clock", lambda: now_s)
        turns = [begin(http, vllm_body(2)) for _ in range(10)]
        await until(lambda: sum(turn.done() for turn in turns) + hung.live == len(turns))
        assert hung.live, "it looks the faster one"
        now_s += 2 * stall_s
        dispatcher.sweep()
        answers = await asyncio.gather(*turns)
        assert all(status == 200 for status, _, _ in answers)
        await until(lambda: hung.live == 0)
        sent = len(hung.requests)
        assert sent <= 10
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
            assert (status, tokens_of(answer)) == (200, [101, 102, 103])
