import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from virtual_time import run_virtually

from rose.client import (
    AnswerBroken,
    ClientClosed,
    GatewayUnavailable,
    RequestRefused,
    Retry,
    RolloutClient,
    Sampling,
    TurnCancelled,
)
from rose.client.resume import Received
from rose.client.retry import REST_S, GatewayMonitor, GatewayRing
from rose.client.types import ClientSettings, ask_for
from rose.contract.gateway import Logprobs, StreamChoice, StreamEvent, TokenLogprob
from tests.fakes.gateway import StandInGateway, until

FAST = Retry(tries=6, first_s=0.005, max_s=0.02)
TEN = Sampling(max_tokens=10)
PROMPT = [1, 100]
COUNT = tuple(range(101, 111))


@pytest.fixture
async def two() -> AsyncIterator[tuple[StandInGateway, StandInGateway]]:
    async with StandInGateway() as one, StandInGateway() as other:
        yield one, other


def _session_of(gateway: StandInGateway, *others: StandInGateway) -> str:
    """A session whose own gateway is the first one."""
    ring = GatewayRing([gateway.url, *(other.url for other in others)])
    return next(s for k in range(99) if ring.order(s := f"s{k}", 0.0)[0] == gateway.url)


async def test_a_dead_gateways_turns_go_on_at_another_under_the_same_id(
    two: tuple[StandInGateway, StandInGateway],
) -> None:
    one, other = two
    session = _session_of(one, other)
    async with RolloutClient([one.url, other.url], retry=FAST) as client:
        one.delay_s = 5
        turn = asyncio.create_task(client.generate(PROMPT, TEN, request_id="r", session_id=session))
        await until(lambda: bool(one.asked))
        await one.die()
        assert (await turn).token_ids == COUNT
    assert [asked["request_id"] for asked in other.asked] == ["r"]
    assert other.made == 1


async def test_a_gateway_that_comes_back_finishes_the_turn() -> None:
    async with StandInGateway() as gateway:
        pass
    async with RolloutClient(gateway.url, retry=Retry(50, 0.01, 0.02)) as client:
        turn = asyncio.create_task(client.generate(PROMPT, TEN))
        await asyncio.sleep(0.05)
        assert not turn.done()
        async with StandInGateway(port=gateway.port):
            assert (await turn).token_ids == COUNT


async def test_a_repeated_try_gets_the_turn_that_was_made_for_the_first() -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url) as client:
        first = await client.generate(PROMPT, TEN, request_id="r")
        gateway.version = 9
        assert await client.generate(PROMPT, TEN, request_id="r") == first
        assert gateway.made == 1


@pytest.mark.parametrize("frozen", [True, False])
async def test_a_frozen_gateway_loses_its_turns_and_a_slow_one_that_answers_probes_does_not(
    two: tuple[StandInGateway, StandInGateway], monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    one, other = two
    if frozen:
        one.silent, one.health_answers = True, False
    else:
        one.delay_s = 0.3
    client = RolloutClient([one.url, other.url], retry=FAST)
    patient = ClientSettings(client.settings.urls, probe_s=0.03, probes=2, retry=FAST)
    monkeypatch.setattr(client, "_settings", patient)
    async with client:
        turn = await client.generate(PROMPT, TEN, session_id=_session_of(one, other))
        assert turn.token_ids == COUNT
    assert (len(one.asked), len(other.asked)) == (1, int(frozen))


async def test_a_stream_hands_out_every_token_as_it_comes_and_the_turn_at_its_end() -> None:
    async with StandInGateway(version=2) as gateway, RolloutClient(gateway.url) as client:
        gateway.new_version_after = 4
        async with client.stream(PROMPT, TEN, request_id="r") as stream:
            with pytest.raises(ClientClosed, match="not whole"):
                _ = stream.turn
            chunks = [chunk async for chunk in stream]
        assert client.progress().tokens == 10
    assert [(c.token_ids[0], c.start, c.version) for c in chunks] == [
        (101 + k, k, 2 if k < 4 else 3) for k in range(10)
    ]
    assert stream.turn.token_ids == COUNT
    assert stream.turn.versions == ((2, 0, 4), (3, 4, 10))
    assert stream.turn.logprobs == pytest.approx([-t / 1000 for t in COUNT])
    assert stream.turn.finish_reason == "length"


@pytest.mark.parametrize("broken_after", [0, 1, 9])
async def test_tokens_that_came_are_kept_when_the_gateway_dies_in_mid_stream(
    broken_after: int, two: tuple[StandInGateway, StandInGateway]
) -> None:
    one, other = two
    one.break_after, other.version = broken_after, 5
    one.dies = True
    async with (
        RolloutClient([one.url, other.url], retry=FAST) as client,
        client.stream(PROMPT, TEN, request_id="r", session_id=_session_of(one, other)) as stream,
    ):
        chunks = [chunk async for chunk in stream]
    assert [t for chunk in chunks for t in chunk.token_ids] == [*COUNT]
    turn = stream.turn
    assert turn.token_ids == COUNT
    # Chunks that the dead gateway had written but that never arrived are made anew.
    kept = len(other.asked[0]["token_ids"]) - len(PROMPT)
    assert kept <= broken_after
    assert other.asked[0]["sampling_params"]["max_tokens"] == 10 - kept
    assert other.asked[0]["request_id"] == (f"r+{kept}" if kept else "r")
    assert turn.versions == (((0, 0, kept), (5, kept, 10)) if kept else ((5, 0, 10),))
    known = ("r", "guest", kept, 10)
    assert turn.segments == ((("unknown", "unknown", 0, kept), known) if kept else (known,))


@pytest.mark.parametrize("broken_after", [1, 5, 9])
async def test_a_broken_connection_is_taken_up_where_the_gateway_knows_the_turn(
    broken_after: int,
) -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url, retry=FAST) as client:
        gateway.break_after = broken_after
        async with client.stream(PROMPT, TEN, request_id="r") as stream:
            tokens = [t async for chunk in stream for t in chunk.token_ids]
    assert (tuple(tokens), stream.turn.token_ids) == (COUNT, COUNT)
    assert stream.turn.segments == (("r", "guest", 0, 10),)
    assert [asked["request_id"] for asked in gateway.asked] == ["r", "r"]
    assert gateway.asked[0] == gateway.asked[1]


def test_a_turn_with_images_goes_on_from_the_prompt_that_has_their_tokens() -> None:
    whole, images = (1, 7, 8, 100), [b"a", b"b"]
    received = Received(ask_for((1, 7, 100), TEN, request_id="r", images=images))
    assert received.rest().body.return_token_ids
    logprobs = Logprobs([TokenLogprob(-0.5)])
    received.add(StreamEvent([StreamChoice([101], logprobs)], prompt_token_ids=whole))
    rest = received.rest()
    assert rest.body.token_ids == (*whole, 101)
    assert [each.data for each in rest.images] == images
    # Elsewhere the prompt begins with what the turn has so far.
    done = StreamChoice([102], logprobs, "length")
    received.add(StreamEvent([done], prompt_token_ids=(*whole, 101)))
    assert received.turn().prompt_token_ids == whole


def test_a_turn_whose_output_counts_is_never_gone_on_with_from_its_tokens() -> None:
    """A gateway shows it when it is whole; what came of it before its gateway died is no prompt."""
    penalized = Sampling(max_tokens=10, frequency_penalty=0.5)
    received = Received(ask_for((1, 100), penalized, request_id="r", session_id="s"))
    assert received.rest().sampling == penalized
    logprobs = Logprobs([TokenLogprob(-0.5), TokenLogprob(-0.5)])
    received.add(StreamEvent([StreamChoice([101, 102], logprobs)]))
    with pytest.raises(AnswerBroken, match="after 2 tokens"):
        received.rest()


@pytest.mark.parametrize("same_for", [0, 2])
async def test_a_gateway_that_was_started_anew_cannot_mix_two_turns(same_for: int) -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url, retry=FAST) as client:
        gateway.break_after = 5
        async with client.stream(PROMPT, TEN, request_id="r") as stream:
            chunks = [await anext(stream) for _ in range(5)]
            gateway.forgets = same_for
            await until(lambda: len(gateway.asked) == 3)
            gateway.forgets = None
            chunks += [chunk async for chunk in stream]
    kept = len(gateway.asked[-1]["token_ids"]) - len(PROMPT)
    assert [asked["request_id"] for asked in gateway.asked] == ["r", "r", f"r+{kept}"]
    assert [t for chunk in chunks for t in chunk.token_ids][:kept] == [*COUNT[:kept]]
    assert stream.turn.token_ids == tuple(t for chunk in chunks for t in chunk.token_ids)


async def test_a_turn_that_was_whole_but_for_its_end_is_not_asked_for_again() -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url, retry=FAST) as client:
        sampling = Sampling(max_tokens=10, stop_token_ids=(104,))
        gateway.break_after = 4
        async with client.stream(PROMPT, sampling) as stream:
            tokens = [t async for chunk in stream for t in chunk.token_ids]
    assert tokens == [101, 102, 103, 104]
    assert (stream.turn.finish_reason, len(gateway.asked)) == ("stop", 1)


async def test_a_stream_that_moves_on_is_tried_for_as_long_as_it_does() -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url, retry=FAST) as client:
        twenty = Sampling(max_tokens=20)
        gateway.break_after, gateway.breaks_again, gateway.delay_s = 1, True, 0.001
        async with client.stream(PROMPT, twenty) as stream:
            tokens = [t async for chunk in stream for t in chunk.token_ids]
    assert tokens == [*range(101, 121)]
    assert len(gateway.asked) > FAST.tries


async def test_errors_inside_a_stream_are_those_of_the_status_they_name() -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url, retry=FAST) as client:
        gateway.stream_error = {"message": "no replica", "type": "no_replica", "code": 503}
        async with client.stream(PROMPT, TEN) as stream:
            assert [t async for chunk in stream for t in chunk.token_ids] == [*COUNT]
        gateway.stream_error = {"message": "bad", "type": "bad_request", "code": 400}
        async with client.stream(PROMPT, TEN) as stream:
            with pytest.raises(RequestRefused, match="bad"):
                [chunk async for chunk in stream]


async def test_more_tokens_than_asked_for_are_no_turn() -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url, retry=FAST) as client:
        gateway.piece = lambda token, at, end: {  # type: ignore[method-assign]
            "choices": [{"token_ids": [1] * 11, "logprobs": {"content": [{"logprob": -1}] * 11}}]
        }
        async with client.stream(PROMPT, TEN) as stream:
            with pytest.raises(AnswerBroken, match="more tokens"):
                [chunk async for chunk in stream]


async def test_leaving_or_cancelling_a_stream_ends_the_turn_at_the_gateway() -> None:
    async with StandInGateway(delay_s=0.01) as gateway, RolloutClient(gateway.url) as client:
        async with client.stream(PROMPT, Sampling(max_tokens=500)) as stream:
            await anext(stream)
        await until(lambda: gateway.left == 1)
        async with client.stream(PROMPT, Sampling(max_tokens=500), request_id="r") as stream:
            await anext(stream)
            client.cancel("r")
            with pytest.raises(TurnCancelled):
                [chunk async for chunk in stream]


async def test_a_slow_reader_does_not_make_the_client_grow() -> None:
    async with (
        StandInGateway() as gateway,
        RolloutClient(gateway.url) as client,
        client.stream(PROMPT, Sampling(max_tokens=400)) as stream,
    ):
        await asyncio.sleep(0.2)
        assert len(stream._chunks) <= 66
        assert [t async for chunk in stream for t in chunk.token_ids] == [*range(101, 501)]


async def test_a_group_is_handed_out_as_its_members_finish() -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url) as client:
        sampling = Sampling(max_tokens=10, seed=40)
        async with client.gather_group(PROMPT, sampling, 4, group_id="g") as group:
            members = [member async for member in group]
    assert sorted(member.index for member in members) == [0, 1, 2, 3]
    assert all(member.turn and member.turn.token_ids == COUNT for member in members)
    asked = {a["request_id"]: a["sampling_params"]["seed"] for a in gateway.asked}
    assert asked == {f"g/{k}": 40 + k for k in range(4)}
    assert sorted(gateway.sessions) == [f"g/{k}" for k in range(4)]


async def test_a_group_says_who_belongs_to_it_and_how_many_copies_it_may_have() -> None:
    said = {"group_id": "g", "group_size": 3, "hedges": 2, "job": "j"}
    async with (
        StandInGateway() as one,
        StandInGateway() as two,
        RolloutClient([one.url, two.url]) as client,
    ):
        async with client.gather_group(
            PROMPT, TEN, 3, group_id="g", hedges=2, job="j", priority=4
        ) as group:
            assert [member.error async for member in group] == [None] * 3
        asked = [*one.asked, *two.asked]
        assert not (one.asked and two.asked), "one gateway has to know the whole group"
        assert [{name: each[name] for name in said} for each in asked] == [said] * 3
        assert [each["priority"] for each in asked] == [4] * 3
        async with client.gather_group(PROMPT, TEN, 2, group_id="h") as group:
            assert [member.error async for member in group] == [None] * 2
        plain = [each for each in (*one.asked, *two.asked) if each["group_id"] == "h"]
        assert all("hedges" not in each and "group_size" not in each for each in plain)
        for wrong in (-1, 4):
            with pytest.raises(RequestRefused, match="one copy for each"):
                client.gather_group(PROMPT, TEN, 3, hedges=wrong)


async def test_a_group_that_has_enough_cancels_the_rest() -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url) as client:
        slow = {"g/1", "g/3"}
        plain = gateway.whole

        async def whole(asked: dict[str, object]) -> bytes:
            await asyncio.sleep(5 if asked["request_id"] in slow else 0)
            return await plain(asked)

        gateway.whole = whole  # type: ignore[method-assign]
        async with client.gather_group(PROMPT, TEN, 4, group_id="g", need=2) as group:
            assert {member.index async for member in group} == {0, 2}
        assert client.progress().running == ()
        await until(lambda: gateway.left == 2)


async def test_a_member_that_fails_is_one_member() -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url) as client:
        gateway.refuse_with, gateway.refusals = (400, {}), 1
        async with client.gather_group(PROMPT, TEN, 3) as group:
            members = [member async for member in group]
        assert sorted(isinstance(m.error, RequestRefused) for m in members) == [False, False, True]
        with pytest.raises(RequestRefused, match="at most all"):
            client.gather_group(PROMPT, TEN, 2, need=3)


async def test_no_gateway_at_all_is_one_error_for_every_member() -> None:
    retry = Retry(2, 0.001, 0.002)
    async with (
        RolloutClient(["http://127.0.0.1:9", "http://127.0.0.1:11"], retry=retry) as client,
        client.gather_group(PROMPT, TEN, 2) as group,
    ):
        members = [member async for member in group]
    assert all(isinstance(member.error, GatewayUnavailable) for member in members)


def test_sessions_keep_their_gateway_spread_out_and_move_only_off_a_dead_one() -> None:
    urls = [f"http://h:{k}" for k in range(4)]
    ring = GatewayRing(urls)
    home = {f"s{k}": ring.order(f"s{k}", 0.0)[0] for k in range(400)}
    counts = [list(home.values()).count(url) for url in urls]
    assert min(counts) > 60
    ring.failed(urls[0], 0.0)
    moved = {s: ring.order(s, 0.1)[0] for s in home}
    assert all(moved[s] == home[s] for s in home if home[s] != urls[0])
    assert urls[0] not in moved.values()
    assert {moved[s] for s in home if home[s] == urls[0]} == set(urls[1:])
    assert ring.order("s0", 0.1)[-1] == urls[0]
    assert {s: ring.order(s, REST_S + 0.1)[0] for s in home} == home


def test_probes_that_cannot_even_be_sent_end_the_waiting() -> None:
    url = "http://127.0.0.1:1"
    http: Any = SimpleNamespace(get=Mock(side_effect=UnicodeError("label too long")))

    async def wait(monitor: GatewayMonitor) -> None:
        try:
            async with monitor.watching(url):
                await asyncio.sleep(3_600)
        finally:
            await monitor.close()

    with pytest.raises(TimeoutError):
        run_virtually(wait(GatewayMonitor(ClientSettings((url,)), http)))
