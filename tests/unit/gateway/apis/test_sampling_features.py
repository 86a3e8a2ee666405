"""Penalties, min_p, prompt logprobs and structured output: what replicas are asked for, by name."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from standin_engines import StandInSglang, StandInVllm
from test_attached_engines import attached

from rose.contract.replica import Sampling
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import (
    base_url,
    calling,
    entry,
    failing_over,
    gateway_with,
    serving,
    until,
)
from tests.unit.gateway.wire_cases import (
    COMPLETIONS,
    GENERATE_ROUTES,
    SGLANG,
    VLLM,
    ask,
    body_of,
    payloads,
    stream,
    tokens_of,
    vllm_body,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
PENALTIES = {
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.25,
}
PLAIN = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "prompt_logprobs": None,
    "structured_outputs": None,
}


async def asked_of_a_replica(path: str, body: Any) -> dict[str, Any]:
    """Send a request that is answered; return the sampling of the replica's."""
    async with serving(name="own-0") as (replica, _, session):
        status, answer, _ = await ask(session, path, body)
    assert status == 200, answer
    return replica.requests[0]["sampling"]


@pytest.mark.parametrize("path", GENERATE_ROUTES)
async def test_penalties_and_min_p_reach_the_replica(path: str) -> None:
    sampling = await asked_of_a_replica(path, body_of(path, 3, **PENALTIES, ignore_eos=True))
    assert sampling.items() >= {**PLAIN, **PENALTIES, "ignore_eos": True}.items()


@pytest.mark.parametrize("path", GENERATE_ROUTES)
async def test_a_plain_turn_is_asked_for_as_ever(path: str) -> None:
    neutral = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": None}
    sampling = await asked_of_a_replica(path, body_of(path, 3, **neutral))
    assert sampling.items() >= PLAIN.items()


@pytest.mark.parametrize(
    ("path", "said", "structured"),
    [
        (VLLM, {"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        (VLLM, {"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": SCHEMA}),
        (COMPLETIONS, {"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            COMPLETIONS,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        (COMPLETIONS, {"response_format": {"type": "text"}}, None),
        (COMPLETIONS, {"guided_json": SCHEMA}, {"json": SCHEMA}),
        (COMPLETIONS, {"guided_regex": "a+"}, {"regex": "a+"}),
        (COMPLETIONS, {"guided_choice": ["x"]}, {"choice": ["x"]}),
        (COMPLETIONS, {"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        (SGLANG, {"json_schema": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        (SGLANG, {"ebnf": "root ::= x"}, {"grammar": "root ::= x"}),
    ],
)
async def test_structured_output_reaches_the_replica_in_one_form(
    path: str, said: Any, structured: Any
) -> None:
    sampling = await asked_of_a_replica(path, body_of(path, 3, **said))
    found = sampling["structured_outputs"]
    if found and "json" in found:
        found["json"] = json.loads(found["json"])
    assert found == structured


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"frequency_penalty": 0.5}, 0),
        ({"presence_penalty": 0.5}, 0),
        ({"structured_outputs": {"regex": "x"}}, 0),
        ({"repetition_penalty": 1.1}, 4),
        ({"min_p": 0.1}, 4),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_whose_output_counts_begins_anew_where_its_replica_died(
    sampling: dict[str, Any], kept: int, streamed: bool
) -> None:
    """Its tokens would be a prompt elsewhere: no penalty on them, no state of a grammar."""
    async with failing_over(second=StandInReplica(version=1)) as (guest, own, _, session):
        guest.break_after = 4
        body = vllm_body(6, sampling=sampling)
        if streamed:
            chunks = payloads((await stream(session, VLLM, body))[1])
            tokens = [t for c in chunks for t in tokens_of(c)]
            last = chunks[-1]
        else:
            _, last, _ = await ask(session, VLLM, body)
            tokens = tokens_of(last)
    assert tokens == [101, 102, 103, 104, 105, 106]
    assert len(guest.requests) == 1
    (again,) = own.requests
    assert again["token_ids"] == [1, 100, *range(101, 101 + kept)]
    assert again["sampling"]["max_tokens"] == 6 - kept
    assert last["attempts"] == 2
    assert last["segments"][-1] == {
        "replica": "own-0",
        "kind": "dedicated",
        "start": kept,
        "end": 6,
    }
    if not streamed:
        assert last["versions"][-1] == {"version": 1, "start": kept, "end": 6}
        assert len(last["versions"]) == len(last["segments"]) == 1 + bool(kept)


@pytest.mark.parametrize("breaks", [0, 2])
async def test_prompt_logprobs_are_vllms_and_survive_a_replica(breaks: int) -> None:
    async with failing_over() as (guest, own, _, session):
        guest.break_after = breaks
        sampling = {"prompt_logprobs": 0}
        body = vllm_body(4, token_ids=[1, 90, 100], sampling=sampling)
        _, answer, _ = await ask(session, VLLM, body)
        body = {"prompt": [1, 90, 100], "max_tokens": 4, **sampling}
        _, openai, _ = await ask(session, COMPLETIONS, body)
    expected = [
        None,
        {"90": {"logprob": -0.09, "rank": 1, "decoded_token": None}},
        {"100": {"logprob": -0.1, "rank": 1, "decoded_token": None}},
    ]
    assert answer["prompt_logprobs"] == expected
    assert openai["choices"][0]["prompt_logprobs"] == expected
    assert answer["choices"][0]["token_ids"] == [101, 102, 103, 104]
    # Logprobs that came before the first token are not computed again behind it.
    assert own.requests[0]["sampling"]["prompt_logprobs"] == (None if breaks else 0)


async def test_a_stock_vllm_is_asked_for_the_same_and_refuses_what_no_stream_has() -> None:
    async with StandInVllm() as engine, attached(engine.url) as (_, session):
        more = {**PENALTIES, "structured_outputs": {"regex": "a+"}, "ignore_eos": True}
        status, _, _ = await ask(session, VLLM, vllm_body(2, sampling=more))
        fixed = {"deterministic": True, "temperature": 0}
        varies, named, _ = await ask(session, VLLM, vllm_body(2, sampling=fixed))
        refused, answer, _ = await ask(session, VLLM, vllm_body(2, sampling={"prompt_logprobs": 0}))
    assert (status, refused, varies) == (200, 400, 400)
    assert "deterministic: a stock replica does not tell" in named["error"]["message"]
    assert engine.requests[0].items() >= more.items()
    assert "a stock vLLM replica" in answer["error"]["message"]


async def test_a_stock_sglang_is_asked_for_what_it_has_and_the_rest_is_refused_by_name() -> None:
    async with StandInSglang() as engine, attached(engine.url) as (_, session):
        more = {"min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.5}
        asked = {**more, "structured_outputs": {"json": "{}"}}
        status, _, _ = await ask(session, VLLM, vllm_body(2, sampling=asked))
        for name, value in {
            "repetition_penalty": 1.1,
            "prompt_logprobs": 0,
            "allowed_token_ids": [5],
            "structured_outputs": {"choice": ["a"]},
            "deterministic": True,
        }.items():
            refused, answer, _ = await ask(session, VLLM, vllm_body(2, sampling={name: value}))
            assert (refused, name in answer["error"]["message"]) == (400, True)
    assert status == 200
    (asked_of_it,) = engine.requests
    sent = asked_of_it["sampling_params"]
    assert sent.items() >= {**more, "json_schema": "{}"}.items()


@pytest.mark.parametrize("api", [VLLM, COMPLETIONS, SGLANG])
async def test_a_deterministic_turn_reaches_its_replica_with_a_seed_or_greedily(api: str) -> None:
    field = {VLLM: "sampling_params", SGLANG: "sampling_params"}.get(api)
    seed = "sampling_seed" if api == SGLANG else "seed"
    statuses = []
    async with StandInReplica() as own, calling(entry(own, "own-0")) as (_, session):
        for more in ({"temperature": 0.0}, {seed: 4, "temperature": 1.0}, {"temperature": 1.0}):
            body, given = body_of(api), {**more, "deterministic": True}
            asked = {**body, field: {**body[field], **given}} if field else {**body, **given}
            status, answer, _ = await ask(session, api, asked)
            statuses.append(status)
    assert statuses == [200, 200, 400]
    assert "send a seed" in json.dumps(answer)
    assert [request["sampling"]["deterministic"] for request in own.requests] == [True, True]


def test_random_numbers_of_a_deterministic_turn_are_drawn_on_one_replica() -> None:
    """A seed's numbers begin anew elsewhere, so the turn does, too; a greedy one has none."""
    assert Sampling(deterministic=True, seed=1).counts_output
    assert not Sampling(deterministic=True, temperature=0.0).counts_output
    assert not Sampling(seed=1).counts_output


@pytest.mark.parametrize(
    "name", ["X-SMG-Routing-Key", "x-session-affinity", "X-Correlation-ID", "X-Session-ID"]
)
async def test_a_trajectory_is_known_by_the_names_that_routers_give_it(name: str) -> None:
    async with StandInReplica() as one, StandInReplica() as two:
        rows = entry(one, "own-0"), entry(two, "own-1")
        async with (
            gateway_with(*rows) as gw,
            aiohttp.ClientSession(base_url(gw), headers={name: "episode"}) as session,
        ):
            for _ in range(4):
                await ask(session, VLLM, vllm_body(2))
            assert gw.status().sessions_known == 1
            status, ended, _ = await ask(session, "/finish_session", {})
            assert gw.status().sessions_known == 0
    assert sorted(map(len, (one.requests, two.requests))) == [0, 4]
    assert (status, ended["session_id"]) == (200, "episode")


async def test_without_a_name_turns_follow_the_prompt_that_they_go_on_from() -> None:
    async with StandInReplica() as one, StandInReplica() as two:
        rows = entry(one, "own-0"), entry(two, "own-1")
        async with calling(*rows) as (gw, session):

            async def episode(first: int) -> None:
                """Three turns, each of which goes on from the tokens of the last."""
                prompt = [first, *range(500)]
                for _ in range(3):
                    body = vllm_body(4, token_ids=prompt)
                    _, answer, _ = await ask(session, VLLM, body)
                    prompt = [*prompt, *answer["choices"][0]["token_ids"], *range(50)]

            one.delay_s = two.delay_s = 0.002
            await asyncio.gather(*(episode(first) for first in range(8)))
            await until(lambda: gw.status().running == 0)
    places = {
        frozenset(
            k
            for k, each in enumerate((one, two))
            for r in each.requests
            if r["token_ids"][0] == first
        )
        for first in range(8)
    }
    assert places == {frozenset({0}), frozenset({1})}, "both have episodes, and each is on one"
