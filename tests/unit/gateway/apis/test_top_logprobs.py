"""Logprobs of the most likely tokens: with each token once, wherever its replicas end."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from standin_engines import StandInSglang, StandInVllm
from test_attached_engines import attached

from elastic_scheduler import TurnJournal
from rose.client import RolloutClient, Sampling
from rose.gateway.backends.replica_apis import LINKS, BackendError
from rose.gateway.replicas.table import ReplicaApi
from rose.gateway.turns.token_stream import TOP_LOGPROBS, TokenStream
from tests.fakes.replica import StandInReplica, top_row
from tests.harness.tokenizer_kinds import save_byte_tokenizer
from tests.unit.gateway.gateway_cases import base_url, calling, entry, failing_over, serving
from tests.unit.gateway.hedged_cases import COUNT, TOKENS, hedged_case, segments_of
from tests.unit.gateway.wire_cases import (
    CHAT,
    COMPLETIONS,
    GENERATE_ROUTES,
    SGLANG,
    VLLM,
    ask,
    body_of,
    vllm_body,
)

MOST = 256


def rows_of(tokens: Any, most: int = MOST) -> bytes:
    return b"".join(top_row(token, most) for token in tokens)


async def a_turn(gateway: Any, stream: bool = False, most: int = MOST) -> Any:
    sampling = Sampling(max_tokens=10, logprobs=most)
    async with RolloutClient(base_url(gateway), timeout_s=30) as client:
        if not stream:
            return await client.generate([1, 100], sampling)
        async with client.stream([1, 100], sampling) as parts:
            chunks = [chunk async for chunk in parts]
        assert b"".join(chunk.top_logprobs.data for chunk in chunks) == parts.turn.top_logprobs.data
        return parts.turn


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["", "revoke_after", "break_after", "hang_after"])
async def test_they_are_joined_over_replicas(fault: str, stream: bool) -> None:
    async with failing_over(stall_s=0.2) as (guest, _, gateway, _):
        if fault:
            setattr(guest, fault, 4)
        turn = await a_turn(gateway, stream)
    assert turn.token_ids == tuple(range(101, 111))
    assert len(turn.segments) == (2 if fault else 1)
    top = turn.top_logprobs
    assert top.data == rows_of(turn.token_ids)
    assert top.token_ids.shape == top.logprobs.shape == (10, MOST)
    assert [*top.token_ids[:, 0]] == [*turn.token_ids]
    assert np.allclose(top.logprobs[:, 0], turn.logprobs)


async def test_a_turn_that_does_not_ask_has_none() -> None:
    async with serving() as (replica, gateway, session):
        assert (await a_turn(gateway, most=0)).top_logprobs is None
        for path in GENERATE_ROUTES:
            await ask(session, path, body_of(path))
    assert [each["sampling"]["logprobs"] for each in replica.requests] == [0] * 4


async def test_the_copy_that_wins_has_one_row_for_each_token() -> None:
    fields = {"sampling": {"logprobs": 3}, "packed": True}
    async with hedged_case() as case:
        first = await case.begun(**fields)
        _, answer, _ = await first
    assert [row[0] for row in segments_of(answer)] == ["own-slow", "own-fast"]
    packed = answer["choices"][0]["top_logprobs"]
    assert packed == {"most": 3, "data": base64.b64encode(rows_of(COUNT, 3)).decode()}
    assert len(base64.b64decode(packed["data"])) == TOKENS * 3 * 8


async def test_they_are_cut_where_a_stop_string_cuts(tmp_path: Path) -> None:
    limits = {"tokenizer": save_byte_tokenizer(tmp_path), "max_model_len": 200}
    body = {"prompt": "A", "max_tokens": 9, "stop": ["DE"], "return_token_ids": True}
    chat = {**body_of(CHAT, 2), "logprobs": True, "top_logprobs": 3}
    async with serving(**limits) as (_, _, session):
        _, answer, _ = await ask(session, COMPLETIONS, {**body, "logprobs": 2})
        _, talked, _ = await ask(session, CHAT, chat)
    (choice,) = answer["choices"]
    assert (choice["stop_reason"], len(choice["token_ids"])) == ("DE", 4)
    top = choice["logprobs"]["top_logprobs"]
    assert [[*each] for each in top] == [["B", "C"], ["C", "D"], ["D", "E"], ["E", "F"]]
    content = talked["choices"][0]["logprobs"]["content"]
    assert [[each["token"] for each in place["top_logprobs"]] for place in content] == [
        ["?", "@", "A"],
        ["@", "A", "B"],
    ]


async def in_json(path: str, body: Any) -> Any:
    async with serving() as (replica, _, session):
        status, answer, _ = await ask(session, path, body)
    assert status == 200, answer
    return replica.requests[0]["sampling"]["logprobs"], answer


async def test_vllms_json_counts_the_sampled_token_among_them() -> None:
    asked, answer = await in_json(VLLM, vllm_body(2, sampling={"logprobs": 3}))
    content = answer["choices"][0]["logprobs"]["content"]
    assert asked == 3
    assert [(each["token_id"], each["logprob"]) for each in content[1]["top_logprobs"]] == [
        (token, pytest.approx(-token / 1000)) for token in (102, 103, 104)
    ]
    assert "top_logprobs" not in answer["choices"][0]
    asked, answer = await in_json(VLLM, vllm_body(2, sampling={"logprobs": 1}))
    content = answer["choices"][0]["logprobs"]["content"]
    assert (asked, len(content[0]["top_logprobs"])) == (0, 1)


async def test_completions_and_sglangs_json_have_them() -> None:
    _, answer = await in_json(COMPLETIONS, body_of(COMPLETIONS, 2, logprobs=2))
    top = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert [[*each] for each in top] == [
        ["token_id:101", "token_id:102"],
        ["token_id:102", "token_id:103"],
    ]
    more = {"return_logprob": True, "top_logprobs_num": 2}
    _, answer = await in_json(SGLANG, {**body_of(SGLANG, 3), **more})
    top = answer["meta_info"]["output_top_logprobs"]
    assert [[each[1] for each in place] for place in top] == [[101, 102], [102, 103], [103, 104]]


@pytest.mark.parametrize("engine", [StandInVllm, StandInSglang, None])
async def test_a_stock_engine_gives_them_too(engine: Any) -> None:
    made = StandInSglang(incremental=True) if engine is None else engine()
    async with made as stock, attached(stock.url) as (gateway, _):
        turn = await a_turn(gateway, most=5)
    assert turn.top_logprobs.data == rows_of(turn.token_ids, 5)


async def test_a_replica_that_gives_none_is_named_in_a_line() -> None:
    async with StandInReplica() as old, calling(entry(old, "own-0")) as (_, session):
        old.gives_top = False
        status, answer, _ = await ask(session, VLLM, vllm_body(2, sampling={"logprobs": 3}))
    assert status == 400
    assert answer["error"]["message"] == "own-0 logprobs: it gives those of sampled tokens alone"


def test_kept_answers_count_their_bytes() -> None:
    journal = TurnJournal([1], 8, max_attempts=1)
    journal.begin("own-0", "dedicated")
    plain = TokenStream(journal.fork()).size_bytes
    journal.append(1, [5], [-0.5], 0, columns={TOP_LOGPROBS: rows_of([5])})
    assert TokenStream(journal).size_bytes > plain + 8 * MOST


def _vllm(name: str) -> bytes:
    top = {name: -0.5, "token_id:5": -1.0}
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [top]}
    return json.dumps({"choices": [{"token_ids": [5], "logprobs": logprobs}]}).encode()


def _sglang(token: int) -> bytes:
    meta: dict[str, Any] = {"completion_tokens": 1, "output_token_logprobs": [[-0.5, 5, None]]}
    meta["output_top_logprobs"] = [[[-0.5, token, None], [-1.0, 5, None]]]
    return json.dumps({"output_ids": [5], "meta_info": meta}).encode()


@pytest.mark.parametrize(
    ("api", "data"),
    [
        (ReplicaApi.VLLM, _vllm("Hello")),
        (ReplicaApi.VLLM, _vllm("token_id:")),
        (ReplicaApi.VLLM, _vllm("token_id:2147483648")),
        (ReplicaApi.SGLANG, _sglang(-1)),
        (ReplicaApi.SGLANG, _sglang(1 << 31)),
    ],
)
def test_an_engine_that_names_no_token_breaks_its_attempt_alone(
    api: ReplicaApi, data: bytes
) -> None:
    reader = LINKS[api].reader(2)
    with pytest.raises((BackendError, msgspec.ValidationError)):
        reader.feed(b"data: " + data + b"\n\n")
