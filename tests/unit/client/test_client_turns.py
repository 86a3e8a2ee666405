import asyncio
import pickle
from typing import Any

import pytest

from rose.client import (
    AnswerBroken,
    ClientClosed,
    GatewayUnavailable,
    RequestRefused,
    Retry,
    RolloutClient,
    RolloutError,
    Sampling,
    TurnCancelled,
    TurnTimedOut,
    VersionNotServed,
    errors,
)
from rose.errors import ConfigError
from tests.fakes.gateway import StandInGateway, until

FAST = Retry(tries=4, first_s=0.005, max_s=0.01)
FIVE = Sampling(max_tokens=5)
PROMPT = [1, 100]
COUNT = (101, 102, 103, 104, 105)


async def test_a_turn_is_asked_for_as_the_trainer_says() -> None:
    async with StandInGateway(version=3) as gateway, RolloutClient(gateway.url) as client:
        sampling = Sampling(0.5, 0.9, 7, 5, 2, (9,), (8, 9), 11)
        turn = await client.generate(
            PROMPT, sampling, request_id="r", session_id="s", exact_version=3, priority=-2
        )
    assert (turn.request_id, turn.token_ids, turn.versions) == ("r", COUNT, ((3, 0, 5),))
    assert turn.logprobs == pytest.approx([-t / 1000 for t in COUNT])
    assert turn.segments == (("r", "guest", 0, 5),)
    asked = gateway.asked[0]
    assert gateway.sessions == ["s"]
    assert (asked["exact_version"], asked.get("min_version"), asked["priority"]) == (3, None, -2)
    assert asked["sampling_params"] == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "max_tokens": 5,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "allowed_token_ids": [8, 9],
        "seed": 11,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "ignore_eos": False,
        "prompt_logprobs": None,
        "structured_outputs": None,
        "logprobs": 0,
        "routed_experts_prompt_start": None,
        "deterministic": False,
    }


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_come_back_later_is_tried_again_under_the_same_id(status: int) -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url, retry=FAST) as client:
        gateway.refuse_with, gateway.refusals = (status, {"Retry-After": "1"}), 2
        turn = await client.generate(PROMPT, FIVE)
        assert client.progress().repeated_tries == 2
    assert turn.token_ids == COUNT
    assert len({asked["request_id"] for asked in gateway.asked}) == 1 < len(gateway.asked)


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, RequestRefused), (404, RequestRefused), (409, VersionNotServed), (413, RequestRefused)],
)
async def test_what_no_retry_changes_is_raised_at_once(
    status: int, error: type[RolloutError]
) -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url, retry=FAST) as client:
        gateway.refuse_with = (status, {})
        with pytest.raises(error, match=f"says {status}"):
            await client.generate(PROMPT, FIVE)
        assert client.progress().failed == 1
    assert len(gateway.asked) == 1


async def test_tries_are_bounded_and_the_last_trouble_is_told() -> None:
    async with (
        RolloutClient("http://127.0.0.1:9", retry=FAST) as client,
        client.session() as session,
    ):
        with pytest.raises(GatewayUnavailable, match=r"in 4 tries; http://127\.0\.0\.1:9: "):
            await client.generate(PROMPT, FIVE)
        assert session.id, "it ends without a word where no gateway listens"


async def test_a_turn_has_one_time_limit_for_all_its_tries() -> None:
    async with (
        StandInGateway(delay_s=5) as gateway,
        RolloutClient(gateway.url, timeout_s=0.05) as client,
    ):
        with pytest.raises(TurnTimedOut, match=r"took more than 0\.05 s"):
            await client.generate(PROMPT, FIVE, request_id="slow")
        assert client.progress().running == ()
        await until(lambda: gateway.left == 1)


async def test_what_is_no_turn_is_said_to_be_none() -> None:
    async with StandInGateway() as gateway, RolloutClient(gateway.url) as client:
        gateway.answers["r"] = b'{"hello": 1}'
        with pytest.raises(AnswerBroken, match="not a turn"):
            await client.generate(PROMPT, FIVE, request_id="r")


async def test_cancel_ends_one_turn_at_the_gateway_and_leaves_its_waiter_alive() -> None:
    async with StandInGateway(delay_s=5) as gateway, RolloutClient(gateway.url) as client:
        slow = asyncio.create_task(client.generate(PROMPT, FIVE, request_id="slow"))
        await until(lambda: len(gateway.asked) == 1)
        running = client.progress().running
        assert [(row.request_id, row.gateway, row.tries) for row in running] == [
            ("slow", gateway.url, 1)
        ]
        with pytest.raises(RequestRefused, match="running already"):
            await client.generate(PROMPT, FIVE, request_id="slow")
        assert client.cancel("slow")
        assert not client.cancel("other")
        with pytest.raises(TurnCancelled, match="slow"):
            await slow
        await until(lambda: gateway.left == 1)
        progress = client.progress()
        assert (progress.cancelled, progress.failed, progress.running) == (1, 0, ())


async def test_a_cancelled_waiter_stays_cancelled_and_leaving_the_client_ends_its_turns() -> None:
    async with StandInGateway(delay_s=5) as gateway:
        async with RolloutClient(gateway.url) as client:
            cancelled, left = (asyncio.create_task(client.generate(PROMPT, FIVE)) for _ in "ab")
            await until(lambda: len(gateway.asked) == 2)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await until(lambda: gateway.left == 1)
        with pytest.raises(TurnCancelled):
            await left
        with pytest.raises(ClientClosed, match="async with"):
            await client.generate(PROMPT, FIVE)


async def test_a_session_names_its_turns_and_says_when_it_is_over() -> None:
    async with (
        StandInGateway() as gateway,
        RolloutClient(gateway.url) as client,
        client.session("traj-7") as session,
    ):
        await session.generate(PROMPT, FIVE)
        async with session.stream(PROMPT, FIVE, request_id="own") as stream:
            assert [chunk async for chunk in stream]
        assert gateway.ended_sessions == []
    assert gateway.sessions == ["traj-7", "traj-7"]
    assert [asked["request_id"] for asked in gateway.asked] == ["traj-7/1", "own"]
    assert gateway.ended_sessions == ["traj-7"]


@pytest.mark.parametrize(
    "urls", ["", "localhost:80", "ftp://h:1", [], ["http://h:1", "http://h:1/"]]
)
def test_wrong_addresses_are_one_clear_line(urls: Any) -> None:
    with pytest.raises(ConfigError, match=r"gateway"):
        RolloutClient(urls)


def test_every_error_of_the_tree_pickles() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        copy = pickle.loads(pickle.dumps(kind("what to do")))
        assert (type(copy), str(copy)) == (kind, "what to do")
        assert issubclass(kind, errors.RolloutError) or kind is errors.RoseError
    assert len(kinds) == 10
