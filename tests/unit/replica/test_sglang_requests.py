"""A turn inside SGLang: what it asks for, and what is made of what comes back."""

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from executor.sglang.compat import STAMP
from rose.contract.replica import GenerateBody, Sampling, StreamLine, StructuredOutputs
from rose.replica.engine import RequestRefusedError
from rose.replica.sglang.engine import SglangError, SglangRequest, parameters, request_id
from rose.replica.sglang.plugin import ALLOWED
from rose.replica.token_versions import KvStaleness, UnknownVersionError


class StandInManager:
    """SGLang's TokenizerManager, as far as a registered request asks it."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(out_list=[], event=asyncio.Event())
        self.rid_to_state = {"r": self.state}
        self.aborted: list[str] = []

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)

    def say(
        self,
        tokens: list[int],
        total: int,
        versions: list[int] | None = None,
        reason: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        meta: dict[str, Any] = {"completion_tokens": total, "finish_reason": reason}
        meta["output_token_logprobs"] = [(-float(token), token, None) for token in tokens]
        meta[STAMP] = versions if versions is not None else [0] * len(tokens)
        self.state.out_list.append({"output_ids": tokens, "meta_info": meta | more})
        self.state.event.set()


@pytest.fixture
def manager() -> StandInManager:
    return StandInManager()


def made(
    manager: StandInManager, began: int = 0, prompt_logprobs: int | None = None
) -> SglangRequest:
    return asking(manager, Sampling(prompt_logprobs=prompt_logprobs), began)


def asking(manager: StandInManager, sampling: Sampling, began: int = 0) -> SglangRequest:
    return SglangRequest(manager, "r", KvStaleness(), began, GenerateBody("r", [4, 5], sampling))


async def test_the_most_likely_tokens_come_with_each_token(manager: StandInManager) -> None:
    request = asking(manager, Sampling(logprobs=2, prompt_logprobs=3))
    places = [[(-0.5, 7, None), (-1.5, 8, None), (-2.5, 9, None)]] * 2
    manager.say([5, 6], 2, output_top_logprobs=places, input_token_logprobs=[(None, 1, None)])
    _, line = (await request.next()).chunks
    assert line.top_logprobs == struct.pack("<2i2f", 7, 8, -0.5, -1.5) * 2
    manager.say([7], 3)
    with pytest.raises(SglangError, match="without 2 logprobs"):
        await request.next()


async def test_what_came_since_the_last_look_is_merged(manager: StandInManager) -> None:
    request = made(manager)
    manager.say([5], 1)
    manager.say([6, 7], 3, reason={"type": "length"})
    delta = await request.next()
    assert [line.token_ids for line in delta.chunks] == [[5], [6, 7]]
    assert [line.logprobs for line in delta.chunks] == [[-5.0], [-6.0, -7.0]]
    assert delta.finish_reason == "length"
    assert request.tokens == 3


@pytest.mark.parametrize("kept_kv", [False, True])
async def test_tokens_are_cut_where_the_version_changes(
    manager: StandInManager, kept_kv: bool
) -> None:
    ages = KvStaleness()
    ages.activated(3, kept_kv=kept_kv)
    request = SglangRequest(manager, "r", ages, 0, GenerateBody("r", [4], Sampling()))
    manager.say([1, 2, 3, 4], 4, [0, 0, 3, 3])
    delta = await request.next()
    assert delta.chunks == [
        StreamLine([1, 2], [-1.0, -2.0], 0),
        StreamLine([3, 4], [-3.0, -4.0], 3, 0 if kept_kv else None),
    ]


async def test_the_token_that_an_abort_repeats_is_told_once(manager: StandInManager) -> None:
    request = made(manager)
    manager.say([5], 1)
    manager.say([5], 1, reason={"type": "abort", "message": "aborted"})
    delta = await request.next()
    assert [line.token_ids for line in delta.chunks] == [[5]]
    assert delta.finish_reason == "abort"


async def test_a_revoked_turn_ends_at_once_though_its_engine_is_frozen(
    manager: StandInManager,
) -> None:
    request = made(manager)
    waits = asyncio.create_task(request.next())
    await asyncio.sleep(0)
    request.end()
    delta = await waits
    assert (delta.chunks, delta.finish_reason) == ([], "abort")
    assert manager.aborted == ["r"]


async def test_a_client_that_left_interrupts(manager: StandInManager) -> None:
    request = made(manager)
    waits = asyncio.create_task(request.next())
    await asyncio.sleep(0)
    request.interrupt(KeyError("gone"))
    with pytest.raises(KeyError):
        await waits


@pytest.mark.parametrize("stamps", [[], [None]])
async def test_a_token_without_a_version_is_worth_nothing(
    manager: StandInManager, stamps: list[Any]
) -> None:
    manager.say([5], 1, stamps)
    with pytest.raises(UnknownVersionError):
        await made(manager).next()


async def test_a_token_without_a_logprob_is_an_error(manager: StandInManager) -> None:
    manager.say([5], 1, output_token_logprobs=[])
    with pytest.raises(SglangError, match="0 logprobs"):
        await made(manager).next()


async def test_what_the_scheduler_refuses_is_the_callers_fault(manager: StandInManager) -> None:
    manager.say([], 0, reason={"type": "abort", "status_code": 400, "message": "too long"})
    with pytest.raises(RequestRefusedError, match="too long") as refused:
        await made(manager).next()
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("most", "place"),
    [
        (0, [(5, -0.5, None)]),
        (1, [(5, -0.5, 2), (8, -0.25, 1)]),
        (2, [(5, -0.5, 2), (8, -0.25, 1)]),
        (3, [(5, -0.5, 2), (8, -0.25, 1), (3, -0.75, 3)]),
    ],
)
@pytest.mark.parametrize("said", [5, 0])
async def test_logprobs_of_the_prompt_come_before_the_first_token(
    manager: StandInManager, most: int, place: list[Any], said: int
) -> None:
    request = made(manager, prompt_logprobs=most)
    likely = [(-0.25, 8, None), (-0.5, 5, None), (-0.75, 3, None)]
    manager.say(
        [9],
        1,
        input_token_logprobs=[(None, 4, None), (-0.5, said, None)],
        input_top_logprobs=[None, likely],
    )
    first, second = (await request.next()).chunks
    assert first.prompt_logprobs == [None, place]
    assert second.token_ids == [9]


async def test_logprobs_of_an_images_tokens_are_those_of_their_own(manager: StandInManager) -> None:
    request = made(manager, prompt_logprobs=0)
    manager.say(
        [9],
        1,
        input_token_logprobs=[(None, 4, None), (-7.0, 0, None)],
        input_token_ids_logprobs=[None, [(-0.5, 5, None)]],
    )
    assert (await request.next()).chunks[0].prompt_logprobs == [None, [(5, -0.5, None)]]


async def test_logprobs_of_a_prompt_are_never_of_two_versions(manager: StandInManager) -> None:
    request = made(manager, prompt_logprobs=1)
    manager.say([9], 1, [1], input_token_logprobs=[(None, 4, None)])
    delta = await request.next()
    assert (delta.chunks, delta.finish_reason) == ([], "abort")


def test_no_id_is_the_beginning_of_another_one() -> None:
    names = [request_id(name) for name in ("a", "a", "a.", "", "rose-warm-up-1")]
    assert not any(x != y and y.startswith(x) for x in names for y in names)
    assert names[-1].startswith("rose-warm-up-")


def test_sampling_is_that_of_the_policy_and_stops_are_named() -> None:
    asked = parameters(Sampling(stop_token_ids=(7,), seed=3, allowed_token_ids=(1, 2)), ends=(7, 9))
    assert asked["stop_token_ids"] == [7, 9]
    assert asked["top_k"] == -1, "off"
    assert asked["ignore_eos"] is True, "ends are stops, which a turn may leave out"
    assert asked["sampling_seed"] == 3
    assert asked["custom_params"] == {ALLOWED: [1, 2]}


async def test_a_deterministic_turn_is_refused_before_it_reaches_an_engine_that_is_not() -> None:
    arguments = SimpleNamespace(enable_deterministic_inference=False)
    body = GenerateBody("a", [1], Sampling(deterministic=True, temperature=0.0))
    with pytest.raises(RequestRefusedError, match="--enable-deterministic-inference") as refused:
        await SglangRequest.start(SimpleNamespace(server_args=arguments), body, KvStaleness(), ())
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (StructuredOutputs(json='{"type": "string"}'), {"json_schema": '{"type": "string"}'}),
        (StructuredOutputs(regex="a+"), {"regex": "a+"}),
        (StructuredOutputs(json_object=True), {"json_schema": '{"type": "object"}'}),
        (StructuredOutputs(choice=('a"b', "c")), {"ebnf": 'root ::= "a\\"b" | "c"'}),
    ],
)
def test_structured_outputs_are_said_in_sglangs_words(
    asked: StructuredOutputs, given: dict[str, str]
) -> None:
    made = parameters(Sampling(structured_outputs=asked))
    assert {name: made[name] for name in given} == given


def test_a_rule_for_whitespace_is_refused() -> None:
    sampling = Sampling(structured_outputs=StructuredOutputs(json="{}", whitespace_pattern=" "))
    with pytest.raises(RequestRefusedError, match="whitespace"):
        parameters(sampling)


def test_what_is_asked_is_json() -> None:
    msgspec.json.encode(parameters(Sampling(allowed_token_ids=(1,))))
