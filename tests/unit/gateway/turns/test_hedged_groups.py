"""The slowest member of a group gets a second copy elsewhere; exactly one answer is delivered."""

import asyncio
from typing import Any

import pytest

from rose.client import RolloutClient, Sampling
from rose.gateway.turns import hedging
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import Ticks, base_url, begin, entry, gateway_with, until
from tests.unit.gateway.hedged_cases import COUNT, SLOW_S, TOKENS, hedged_case, member, segments_of
from tests.unit.gateway.wire_cases import VLLM, ask, get, stream, tokens_of, vllm_body

UNHEDGED_TICKS = TOKENS * SLOW_S * 1_000


async def test_the_slowest_member_is_copied_and_the_group_ends_sooner() -> None:
    async with hedged_case() as case, Ticks() as ticks:
        first = await case.begun()
        status, answer, _ = await first
        took = ticks.count
        await until(lambda: case.slow.cancelled == 1)
        told = await get(case.http, "/rose/v1/explain/a")
        counted = await get(case.http, "/rose/v1/stats")
        lines = (await get(case.http, "/metrics")).splitlines()
        again, repeated, _ = await ask(case.http, VLLM, member("a"))
    assert status == again == 200
    assert took < 0.75 * UNHEDGED_TICKS
    # Bit-equal to one replica's chain, with the stamps of the winner alone.
    assert tokens_of(answer) == COUNT
    content = answer["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in content] == [-token / 1000 for token in COUNT]
    (_, _, forked), last = segments_of(answer)
    assert last == ("own-fast", forked, TOKENS)
    assert answer["versions"] == [
        {"version": 1, "start": 0, "end": forked},
        {"version": 2, "start": forked, "end": TOKENS},
    ]
    assert case.fast.requests[-1]["token_ids"] == [1, 100, *COUNT[:forked]]
    assert case.fast.requests[-1]["request_id"] != case.slow.requests[-1]["request_id"]
    assert answer["attempts"] == 2
    assert (repeated["segments"], case.stats.turns) == (answer["segments"], 2)
    assert (counted["hedges"], counted["hedge_wins"]) == (1, 1)
    assert "rose_gateway_hedges_total 1" in lines
    assert "rose_gateway_hedge_wins_total 1" in lines
    why = [(each["replica"], each["why"]) for each in told["decisions"]]
    assert why[0][0] == "own-slow"
    assert why[-1][0] == "own-fast"
    assert why[-1][1].startswith("a copy that is expected to save its group ")
    assert case.gateway.status().hedged_groups == 0, "a group that is complete is forgotten"


@pytest.mark.parametrize("fault", ["hang_after", "revoke_after", "break_after", "draining"])
async def test_the_original_may_win_and_then_nothing_of_the_copy_is_left(fault: str) -> None:
    async with hedged_case() as case:
        first = await case.begun()
        setattr(case.fast, fault, True if fault == "draining" else 3)
        if fault == "hang_after":
            await until(lambda: case.stats.tokens["own-fast"] == TOKENS + 3)
        else:
            await until(lambda: sum(case.stats.ends.values()) == 2)
        case.slow.delay_s = 0.005
        status, answer, _ = await first
        await until(lambda: case.fast.cancelled == (fault == "hang_after"))
        await case.over()
    assert (status, tokens_of(answer)) == (200, COUNT)
    assert segments_of(answer) == [("own-slow", 0, TOKENS)]
    assert answer["versions"] == [{"version": 1, "start": 0, "end": TOKENS}]
    assert case.slow.cancelled == 0
    assert fault != "hang_after" or answer["attempts"] == 1
    stats = case.stats
    assert (stats.hedges, stats.hedge_wins, stats.turns, stats.continuations) == (1, 0, 2, 0)


async def test_when_the_original_is_revoked_the_copy_goes_on_alone() -> None:
    async with hedged_case() as case:
        first = await case.begun()
        case.fast.delay_s = 0.02
        await until(lambda: case.fast.live == 1)
        case.table("fast")
        await until(lambda: case.slow.cancelled == 1)
        assert case.fast.live == 1
        status, answer, _ = await first
    assert (status, tokens_of(answer)) == (200, COUNT)
    assert segments_of(answer)[-1][0] == "own-fast"
    assert (case.stats.hedge_wins, case.stats.continuations) == (1, 0)


async def test_when_both_are_lost_the_turn_goes_on_from_the_last_one() -> None:
    async with hedged_case() as case, StandInReplica(version=3) as third:
        first = await case.begun()
        case.fast.hang_after = 4
        await until(lambda: case.stats.tokens["own-fast"] == TOKENS + 4)
        case.table("fast")
        await until(lambda: case.slow.cancelled == 1)
        case.gateway.set_table((entry(third, "own-third"),))
        status, answer, _ = await first
        assert (status, tokens_of(answer)) == (200, COUNT)
        (_, _, forked), (_, begun, lost), (_, _, end) = segments_of(answer)
        assert [s["replica"] for s in answer["segments"]] == ["own-slow", "own-fast", "own-third"]
        assert (begun, lost, end) == (forked, forked + 4, TOKENS)
        assert (answer["attempts"], case.stats.continuations) == (3, 1)
        case.gateway.set_table(())


async def test_when_both_fail_for_good_the_turn_fails_once() -> None:
    async with hedged_case(max_attempts=2) as case:
        first = await case.begun()
        case.fast.break_after = 2
        await until(lambda: case.stats.hedges == 1)
        await until(lambda: case.stats.ends["broken"] == 1)
        assert not first.done()
        case.slow.draining = True
        case.table()
        case.table("slow")
        status, answer, _ = await first
        # The member's place is free: it may be requested again, without another copy.
        case.slow.draining, case.fast.break_after = False, None
        case.slow.delay_s = 0.001
        case.table("slow")
        again, _, _ = await ask(case.http, VLLM, member("a"))
    assert (status, again) == (503, 200)
    assert "2 replicas failed the turn" in answer["error"]["message"]
    assert (case.stats.failed, case.stats.hedges) == (1, 1)


async def test_without_hedges_or_in_a_group_of_one_there_are_no_copies() -> None:
    async with hedged_case() as case:
        first = await case.begun(hedges=0)
        alone = member("c", group_id="single", group_size=1)
        case.table("slow")
        single = begin(case.http, alone)
        await until(lambda: case.slow.live == 2)
        case.table("slow", "fast")
        answers = await asyncio.gather(first, single)
    assert [tokens_of(answer) for _, answer, _ in answers] == [COUNT, COUNT]
    assert (case.stats.hedges, len(case.slow.requests)) == (0, 2)


@pytest.mark.parametrize("hedges", [1, 2])
async def test_a_group_never_has_more_copies_than_it_may(hedges: int) -> None:
    sizes = {"group_size": 8, "hedges": hedges}
    async with hedged_case() as case:
        case.slow.delay_s = 0.05
        case.rows["slow"] = entry(case.slow, "own-slow", decode_tok_s=60.0)

        def members(name: str, *tokens: int) -> list[Any]:
            return [
                begin(case.http, member(f"{name}{k}", sampling={"max_tokens": n}, **sizes))
                for k, n in enumerate(tokens)
            ]

        case.table("slow")
        slow = members("s", 4, 8, 40, 120)
        await until(lambda: case.slow.live == 4)
        case.table("slow", "fast")
        quick = members("q", 120, 120, 120, 120)
        # However busy the machine is, the two that are left are not done before the quick ones.
        await asyncio.gather(*slow[:2])
        case.slow.delay_s = 0.5
        await until(lambda: case.stats.hedges == hedges)
        case.slow.delay_s = 0.05
        answers = [*await asyncio.gather(*quick), *await asyncio.gather(*slow)]
        lengths = [len(tokens_of(answer)) for _, answer, _ in answers]
        assert lengths == [120] * 4 + [4, 8, 40, 120]
        assert case.stats.hedges == hedges
        assert len(case.fast.requests) == 4 + hedges
        await until(lambda: case.gateway.status().hedged_groups == 0)


async def test_copies_take_no_place_that_a_turn_waits_for() -> None:
    async with hedged_case() as case:
        case.rows["fast"] = entry(case.fast, "own-fast", decode_tok_s=1e3, max_sequences=1)
        first = await case.begun()
        waiting = vllm_body(1, exact_version=9)
        line = begin(case.http, waiting)
        await until(lambda: case.gateway.status().waiting == 1)
        status, answer, _ = await first
        line.cancel()
        await until(lambda: case.gateway.status().waiting == 0)
    assert (status, segments_of(answer)) == (200, [("own-slow", 0, TOKENS)])
    assert case.stats.hedges == 0


async def test_a_caller_that_leaves_ends_both_copies() -> None:
    async with hedged_case() as case:
        first = await case.begun()
        case.fast.delay_s = 0.1
        await until(lambda: case.fast.live == 1)
        first.cancel()
        await until(lambda: case.slow.cancelled == case.fast.cancelled == 1)
        await case.over()
        assert not case.gateway.status().running


async def test_a_deadline_ends_both_copies_and_says_how_far_the_turn_was() -> None:
    async with hedged_case() as case:
        first = await case.begun(timeout_s=1.0)
        case.slow.hang_after, case.fast.hang_after = 8, 8
        status, answer, _ = await first
        await until(lambda: case.slow.cancelled == case.fast.cancelled == 1)
        await case.over()
        made = case.stats.tokens["own-slow"]
    assert status == 504
    far = int(answer["error"]["message"].split(" tokens so far")[0].split()[-1])
    assert far >= made >= 2


async def test_members_that_contradict_each_other_are_told_so() -> None:
    async with hedged_case() as case:
        first = await case.first()
        status, answer, _ = await ask(case.http, VLLM, member("b", group_size=3))
        assert status == 400
        assert "group_size 2 and hedges 1" in answer["error"]["message"]
        first.cancel()
        await until(lambda: case.slow.cancelled == 1)
        # Nobody runs any more: the name may be another group's.
        assert (await ask(case.http, VLLM, member("b", group_size=3)))[0] == 200


async def test_whoever_reads_a_hedged_turn_as_a_stream_gets_the_winner() -> None:
    async with hedged_case() as case:
        first = await case.first()
        reader = asyncio.create_task(stream(case.http, VLLM, vllm_body(TOKENS, request_id="a")))
        assert (await ask(case.http, VLLM, member("b")))[0] == 200
        await first
        _, events = await reader
    assert '"token_ids":[' + ",".join(map(str, COUNT)) + "]" in events[0]
    assert case.stats.hedge_wins == 1


async def test_the_client_asks_one_gateway_for_a_hedged_group() -> None:
    async with StandInReplica(delay_s=SLOW_S) as slow, StandInReplica(delay_s=0.002) as fast:
        rows = (
            entry(slow, "own-slow", decode_tok_s=75.0),
            entry(fast, "own-fast", decode_tok_s=1e3, max_sequences=3),
        )
        async with (
            gateway_with(*rows, stall_s=9) as one,
            gateway_with(*rows, stall_s=9) as two,
            RolloutClient([base_url(one), base_url(two)]) as client,
            Ticks() as ticks,
        ):
            async with client.gather_group(
                [1, 100], Sampling(max_tokens=TOKENS), 4, group_id="g", hedges=1
            ) as group:
                turns = [found.turn async for found in group]
            took = ticks.count
            hedges = sorted(each.stats.hedges for each in (one, two))
            counts = sorted(each.stats.turns for each in (one, two))
    assert all(turn is not None and [*turn.token_ids] == COUNT for turn in turns)
    assert (hedges, counts) == ([0, 1], [0, 4])
    assert took < 0.75 * UNHEDGED_TICKS


async def test_samples_of_one_request_are_a_group_too() -> None:
    async with hedged_case() as case:
        case.rows["fast"] = entry(case.fast, "own-fast", decode_tok_s=1e3, max_sequences=3)
        case.table("slow", "fast")
        status, answer, _ = await ask(case.http, VLLM, member("a", group_size=4, sampling={"n": 4}))
        assert status == 200
        assert [choice["token_ids"] for choice in answer["choices"]] == [COUNT] * 4
        assert (case.stats.hedges, case.stats.turns) == (1, 4)
        await case.over()


async def test_a_turn_beyond_the_groups_size_is_answered_without_a_copy() -> None:
    async with hedged_case() as case:
        first = await case.first()
        other = begin(case.http, member("b"))
        await until(lambda: case.stats.attempts == 2)
        status, answer, _ = await ask(case.http, VLLM, member("c"))
        assert (status, tokens_of(answer)) == (200, COUNT)
        assert case.gateway.status().hedged_groups == 1
        await asyncio.gather(first, other)
        await until(lambda: case.gateway.status().hedged_groups == 0)


async def test_groups_that_never_become_complete_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hedging, "IDLE_GROUPS_KEPT", 3)
    async with hedged_case() as case:
        case.table("fast")
        for number in range(10):
            status, _, _ = await ask(
                case.http, VLLM, member("a" * (1 + number), group_id=f"g{number}")
            )
            assert status == 200
        await until(lambda: case.gateway.status().hedged_groups == 3)
        # The second half of one that is still known completes it.
        assert (await ask(case.http, VLLM, member("b", group_id="g9")))[0] == 200
        await until(lambda: case.gateway.status().hedged_groups == 2)
