import asyncio
from itertools import pairwise
from typing import Any

import pytest
from gateway_cases import base_url, entry, gateway_with, until

from rose.client import RolloutClient, Sampling
from tests.fakes.replica import StandInReplica

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
    async with StandInReplica(version=3) as replica, gateway_with(entry(replica, "ded-0")) as gw:
        turn = await one_turn(gw)
    assert_whole(turn)
    assert turn.versions == ((3, 0, 10),)
    assert turn.segments == (("ded-0", "dedicated", 0, 10),)
    assert (turn.attempts, turn.finish_reason) == (1, "length")


async def _updated_under_way(gateway: Any, stream: bool) -> Any:
    async with RolloutClient(base_url(gateway), timeout_s=10) as client:
        if not stream:
            return await client.generate(PROMPT, TEN, request_id="whole"), []
        async with client.stream(PROMPT, TEN, request_id="streamed") as stream:
            chunks = [chunk async for chunk in stream]
            return stream.turn, chunks


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_on_kept_kv_say_how_old_it_is(stream: bool) -> None:
    async with StandInReplica(version=3) as replica, gateway_with(entry(replica, "ded-0")) as gw:
        replica.update_at = 4
        turn, chunks = await _updated_under_way(gw, stream)
    assert_whole(turn)
    assert turn.versions == ((3, 0, 4), (4, 4, 10))
    assert turn.oldest_versions == ((3, 4, 10),)
    assert turn.oldest_version == 3
    for chunk in chunks:
        assert (chunk.version, chunk.oldest_version) == ((4, 3) if chunk.start >= 4 else (3, None))


async def test_kv_made_anew_elsewhere_is_as_young_as_its_tokens() -> None:
    async with StandInReplica(version=3) as old, StandInReplica(version=4) as new:
        old.update_at, old.revoke_after = 2, 5
        rows = (entry(old, "old", decode_tok_s=9e5), entry(new, "new", decode_tok_s=1e3))
        async with gateway_with(*rows) as gw:
            turn = await one_turn(gw)
    assert_whole(turn)
    assert turn.versions == ((3, 0, 2), (4, 2, 10))
    assert turn.oldest_versions == ((3, 2, 5),)


async def _continued(fault: Any, value: Any, **settings: Any) -> Any:
    """A turn whose first replica (the guest: it offers more) fails after 4 tokens."""
    async with StandInReplica(version=1) as guest, StandInReplica(version=2) as dedicated:
        setattr(guest, fault, value)
        rows = (
            entry(guest, "guest-0", decode_tok_s=9e5),
            entry(dedicated, "ded-0", decode_tok_s=1e3),
        )
        async with gateway_with(*rows, **settings) as gw:
            turn = await one_turn(gw)
            return turn, guest, dedicated


async def test_a_revoked_stream_goes_on_elsewhere_with_prompt_and_journal() -> None:
    turn, guest, dedicated = await _continued("revoke_after", 4)
    assert_whole(turn)
    assert turn.segments == (("guest-0", "guest", 0, 4), ("ded-0", "dedicated", 4, 10))
    assert turn.versions == ((1, 0, 4), (2, 4, 10))
    assert turn.attempts == 2
    assert dedicated.requests[0]["token_ids"] == [*PROMPT, *COUNT[:4]]
    assert dedicated.requests[0]["sampling"]["max_tokens"] == 6
    assert dedicated.requests[0]["sampling"]["min_tokens"] == 3
    assert guest.requests[0]["request_id"] != dedicated.requests[0]["request_id"]


async def test_a_broken_stream_goes_on_elsewhere() -> None:
    turn, _, _ = await _continued("break_after", 4)
    assert_whole(turn)
    assert turn.segments[-1] == ("ded-0", "dedicated", 4, 10)


async def test_a_draining_replica_costs_an_attempt_but_no_token() -> None:
    turn, guest, _ = await _continued("draining", True)
    assert_whole(turn)
    assert turn.segments == (("ded-0", "dedicated", 0, 10),)
    assert len(guest.requests) == 1


async def test_a_stalled_stream_moves_when_another_replica_has_room() -> None:
    turn, guest, _ = await _continued("hang_after", 4, stall_s=0.05)
    assert_whole(turn)
    assert turn.segments[-1] == ("ded-0", "dedicated", 4, 10)
    assert guest.cancelled == 1


async def test_a_lost_lease_ends_the_stream_at_once() -> None:
    async with StandInReplica() as guest, StandInReplica() as dedicated:
        guest.hang_after = 4
        rows = (entry(guest, "guest-0", decode_tok_s=9e5), entry(dedicated, "ded-0"))
        async with gateway_with(*rows) as gw:
            turn = asyncio.create_task(one_turn(gw))
            await until(lambda: guest.live > 0)
            await asyncio.sleep(0.02)
            gw.set_table((entry(guest, "guest-0", lease_epoch=2, healthy=False), rows[1]))
            assert_whole(await turn)
            assert guest.cancelled == 1
            assert gw.status().live_turns == {"guest-0": 0, "ded-0": 0}


async def test_a_turn_complete_but_for_its_last_line_is_not_generated_again() -> None:
    async with StandInReplica() as guest, gateway_with(entry(guest, "guest-0")) as gw:
        guest.break_after = 9
        guest.stop_after = None
        async with RolloutClient(base_url(gw), timeout_s=10) as client:
            turn = await client.generate(
                PROMPT,
                Sampling(max_tokens=20, stop_token_ids=(109,)),
                request_id="r",
                session_id="s",
            )
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
    async with (
        StandInReplica(delay_s=0.001) as guest,
        gateway_with(entry(guest, "guest-0", max_sequences=3)) as gw,
        RolloutClient(base_url(gw), timeout_s=10) as client,
    ):
        turns = [
            client.generate(PROMPT, TEN, request_id=f"r{i}", session_id="s") for i in range(20)
        ]
        for turn in await asyncio.gather(*turns):
            assert_whole(turn)
    assert guest.max_live == 3


async def test_min_version_waits_for_the_version_to_arrive() -> None:
    async with StandInReplica(version=1) as guest, gateway_with(entry(guest, "guest-0")) as gw:
        turn = asyncio.create_task(one_turn(gw, min_version=2))
        await until(lambda: gw.status().waiting > 0)
        guest.version = 2
        gw.set_table((entry(guest, "guest-0"),))
        assert (await turn).versions == ((2, 0, 10),)


async def test_tokens_older_than_the_table_says_are_never_journaled() -> None:
    async with StandInReplica(version=1) as liar, StandInReplica(version=2) as honest:
        rows = (
            entry(liar, "guest-0", policy_version=2, decode_tok_s=9e5),
            entry(honest, "ded-0"),
        )
        async with gateway_with(*rows) as gw:
            turn = await one_turn(gw, min_version=2)
    assert turn.versions == ((2, 0, 10),)
    assert turn.attempts == 2
