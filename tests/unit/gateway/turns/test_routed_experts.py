"""Experts of each position: once in a turn, wherever its replicas end."""

import base64
import io
from typing import Any

import numpy as np
import pytest

from rose.client import RolloutClient, Sampling
from tests.fakes.replica import StandInReplica, route_row
from tests.unit.gateway.gateway_cases import base_url, calling, entry, failing_over, serving
from tests.unit.gateway.hedged_cases import COUNT, hedged_case, segments_of
from tests.unit.gateway.wire_cases import COMPLETIONS, SGLANG, VLLM, ask, body_of, vllm_body

PROMPT = [1, 90, 95, 100]


def routes_of(positions: Any) -> Any:
    """Return the experts of these tokens' positions."""
    rows = b"".join(route_row(token) for token in positions)
    return np.frombuffer(rows, np.uint8).reshape(-1, 2, 3)


def read(found: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(found)))


async def a_turn(gateway: Any, stream: bool = False) -> Any:
    sampling = Sampling(max_tokens=10)
    async with RolloutClient(base_url(gateway), timeout_s=30) as client:
        if not stream:
            return await client.generate(PROMPT, sampling, routed_experts=True)
        async with client.stream(PROMPT, sampling, routed_experts=True) as parts:
            async for _ in parts:
                pass
        return parts.turn


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("fault", ["", "revoke_after", "break_after", "hang_after"])
async def test_each_position_comes_once(fault: str, after: int, stream: bool) -> None:
    async with failing_over(stall_s=0.2) as (guest, own, gateway, _):
        if fault:
            setattr(guest, fault, after)
        turn = await a_turn(gateway, stream)
    assert turn.token_ids == tuple(range(101, 111))
    assert turn.attempts == (2 if fault else 1)
    assert np.array_equal(turn.routed_experts, routes_of([*PROMPT, *turn.token_ids][:-1]))
    if fault and after:
        (rest,) = own.requests
        assert rest["sampling"]["routed_experts_prompt_start"] == len(rest["token_ids"]) - 1


async def test_the_copy_that_wins_has_each_position_once() -> None:
    async with hedged_case() as case:
        first = await case.begun(routed_experts=True)
        _, answer, _ = await first
    assert [row[0] for row in segments_of(answer)] == ["own-slow", "own-fast"]
    found = read(answer["choices"][0]["routed_experts"])
    assert np.array_equal(found, routes_of([1, 100, *COUNT[:-1]]))


@pytest.mark.parametrize("start", [0, 2, 3])
async def test_a_caller_may_have_those_of_the_prompt_already(start: int) -> None:
    sampling = {"routed_experts_prompt_start": start}
    body = vllm_body(3, token_ids=PROMPT, sampling=sampling, routed_experts=True)
    async with serving() as (_, _, session):
        _, answer, _ = await ask(session, VLLM, body)
        late = {**sampling, "routed_experts_prompt_start": 4}
        refused, _, _ = await ask(session, VLLM, {**body, "sampling_params": late})
    found = read(answer["choices"][0]["routed_experts"])
    assert np.array_equal(found, routes_of([*PROMPT, 101, 102][start:]))
    assert refused == 400


async def test_a_turn_that_does_not_ask_has_none() -> None:
    async with serving() as (replica, _, session):
        body = vllm_body(3, sampling={"routed_experts_prompt_start": 0})
        _, answer, _ = await ask(session, VLLM, body)
        _, plain, _ = await ask(session, COMPLETIONS, body_of(COMPLETIONS))
        _, completed, _ = await ask(
            session, COMPLETIONS, {**body_of(COMPLETIONS), "routed_experts": True}
        )
    for without, request in zip((answer, plain), replica.requests, strict=False):
        assert without["choices"][0]["routed_experts"] is None
        assert request["sampling"]["routed_experts_prompt_start"] is None
    assert read(completed["choices"][0]["routed_experts"]).shape == (4, 2, 3)


async def test_what_cannot_be_given_is_refused_in_a_line() -> None:
    async with StandInReplica() as old, calling(entry(old, "own-0")) as (_, session):
        old.gives_routes = False
        status, answer, _ = await ask(session, VLLM, vllm_body(2, routed_experts=True))
        stream = {**body_of(COMPLETIONS), "routed_experts": True, "stream": True}
        streamed, said, _ = await ask(session, COMPLETIONS, stream)
        other, named, _ = await ask(session, SGLANG, {**body_of(SGLANG), "routed_experts": True})
    assert status == streamed == other == 400
    assert answer["error"]["message"] == "own-0 routed_experts: it gives none"
    assert said["error"]["param"] == "routed_experts"
    assert "/inference/v1/generate" in named["error"]["message"]
