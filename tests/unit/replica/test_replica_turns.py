import asyncio
import json
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from rose.contract.replica import MAX_BODY_BYTES
from rose.replica.admission import Admission
from rose.replica.endpoint import GenerateApp
from rose.replica.turns import Turns
from rose.replica.vllm import VllmEngine
from tests.fakes.asgi_client import AsgiExchange, exchange, settle
from tests.fakes.async_llm import FakeAsyncLLM, logprob_of

PATH = "/rose/v1/generate"
BODY = {"request_id": "r", "token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}


class Served:
    def __init__(self, stream_interval: int = 1) -> None:
        self.engine = FakeAsyncLLM(stream_interval)
        self.admission = Admission()
        self.admission.admit(1)
        self.app = GenerateApp(self.admission)
        self.turns = self.app.turns = Turns(VllmEngine(self.engine))

    async def begin(self, **changes: Any) -> AsgiExchange:
        begun = exchange(self.app, PATH, BODY | changes)
        await settle()
        return begun


def tokens(lines: list[dict[str, Any]]) -> list[int]:
    return [token for line in lines for token in line.get("token_ids", [])]


async def test_each_step_is_one_chunk_with_its_logprobs_and_the_finish_comes_along() -> None:
    served = Served()
    begun = await served.begin(cache_salt="v0")
    for last in (False, False, True):
        served.engine.step(FinishReason.STOP if last else None)
        await settle()
    await begun.done()
    assert begun.lines == [
        {"token_ids": [0], "logprobs": [0.0], "version": 0},
        {"token_ids": [1], "logprobs": [logprob_of(1)], "version": 0},
        {"token_ids": [2], "logprobs": [logprob_of(2)], "version": 0, "finish_reason": "stop"},
    ]
    assert begun.sends == 4, "headers, two chunks, and the last one with the finish"
    assert served.engine.prompts == [
        {"type": "token", "prompt_token_ids": [1, 2, 3], "cache_salt": "v0"}
    ]
    assert served.turns.tokens_total == 3
    assert not served.engine.core_aborts


@pytest.mark.parametrize("stream_interval", [1, 3])
@pytest.mark.parametrize("unread", [False, True])
async def test_a_chunk_never_spans_two_versions(stream_interval: int, unread: bool) -> None:
    served = Served(stream_interval)
    begun = await served.begin()
    for index, version in enumerate(["default"] * 3 + ["7"] * 4 + ["8"] * 2):
        served.engine.weight_version = version
        served.engine.step(FinishReason.LENGTH if index == 8 else None)
        if not unread:
            await settle()
    await begun.done()
    *chunks, finish = begun.lines
    stamps = [chunk["version"] for chunk in chunks for _ in chunk["token_ids"]]
    assert stamps == [0] * 3 + [7] * 4 + [8] * 2
    assert tokens(chunks) == list(range(9))
    assert [p for c in chunks for p in c["logprobs"]] == [logprob_of(t) for t in range(9)]
    assert finish == {"finish_reason": "length"}


async def test_tokens_without_a_version_end_the_turn_as_an_error() -> None:
    served = Served()
    served.engine.weight_version = None
    begun = await served.begin()
    served.engine.step()
    await begun.done()
    assert [line["finish_reason"] for line in begun.lines] == ["error"]
    assert served.engine.live == 0


@pytest.mark.parametrize("stream_interval", [1, 16])
async def test_a_drain_delivers_what_the_engine_made_and_needs_no_further_step(
    stream_interval: int,
) -> None:
    served = Served(stream_interval)
    running, waiting = await served.begin(), await served.begin(request_id="w")
    served.engine.output_processor.abort_requests(["w"], internal=False)
    for _ in range(5):
        served.engine.step()
    assert await served.turns.revoke_all() == 2
    await running.done()
    await waiting.done()
    assert tokens(running.lines) == list(range(5))
    assert running.lines[-1] == {"finish_reason": "revoked"}
    assert waiting.lines == [{"finish_reason": "revoked"}]
    assert served.turns.running == served.turns.waiting == served.engine.live == 0


async def test_a_drain_finds_a_turn_that_the_engine_has_not_registered_yet() -> None:
    served = Served()
    served.engine.adding.clear()
    begun = await served.begin()
    assert await served.turns.revoke_all() == 1
    served.engine.adding.set()
    await begun.done()
    assert begun.lines == [{"finish_reason": "revoked"}]
    assert served.engine.live == 0


async def test_of_a_turn_that_was_ended_before_the_engine_had_it_no_token_is_heard() -> None:
    served = Served()
    registered = served.engine.add_request

    async def with_a_step(*args: Any, **options: Any) -> RequestOutputCollector:
        queue = await registered(*args, **options)
        served.engine.step()
        return queue

    served.engine.add_request = with_a_step  # type: ignore[method-assign]
    served.engine.adding.clear()
    begun = await served.begin(job="a")
    assert await served.turns.revoke_others("b") == 1
    served.engine.adding.set()
    await begun.done()
    assert begun.lines == [{"finish_reason": "revoked"}], "it is of the weights of another job"


async def test_no_turn_slips_in_while_its_body_arrives_during_a_drain() -> None:
    served = Served()
    late = AsgiExchange(served.app, PATH, json.dumps(BODY).encode())
    await settle()
    served.admission.close(1, "host is busy")
    assert await served.turns.revoke_all() == 0
    late.send_body()
    await late.done()
    assert late.status == 503
    assert late.json["error"]["type"] == "draining"
    assert not served.engine.prompts


@pytest.mark.parametrize("registered", [True, False])
async def test_a_client_that_leaves_ends_its_turn_in_the_engine(registered: bool) -> None:
    served = Served()
    if not registered:
        served.engine.adding.clear()
    begun = await served.begin()
    begun.leave()
    await settle()
    served.engine.adding.set()
    await begun.done()
    assert served.engine.live == 0
    assert len(served.engine.core_aborts) == 1
    assert served.turns.running == served.turns.waiting == 0


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (VLLMValidationError("too long"), 400),
        (ValueError("bad"), 400),
        (GracefulHTTPError("full", HTTPStatus.SERVICE_UNAVAILABLE), 503),
        (EngineDeadError(), 503),
    ],
)
async def test_what_the_engine_refuses_is_an_http_status(failure: Exception, status: int) -> None:
    served = Served()
    served.engine.refuse_with = failure
    begun = await served.begin()
    await begun.done()
    assert begun.status == status
    assert served.turns.waiting == 0


async def test_a_dead_engine_ends_its_turns_with_an_error() -> None:
    served = Served()
    begun = await served.begin()
    served.engine.step()
    await settle()
    served.engine.output_processor.propagate_error(EngineDeadError())
    await begun.done()
    assert [line.get("finish_reason") for line in begun.lines] == [None, "error"]


async def test_bodies_are_checked() -> None:
    served = Served()
    assert (await exchange(served.app, PATH, {"request_id": "r"}).done()).status == 400
    assert (await exchange(served.app, PATH, b"x" * (MAX_BODY_BYTES + 1)).done()).status == 413


async def test_sampling_is_that_of_the_request_and_only_stop_tokens_stop() -> None:
    served = Served()
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "max_tokens": 4,
        "stop_token_ids": [7],
        "allowed_token_ids": [7, 8],
        "seed": 11,
    }
    begun = await served.begin(sampling=sampling)
    parameters = served.engine.parameters[0]
    assert {name: getattr(parameters, name) for name in sampling} == sampling
    assert parameters.ignore_eos
    begun.leave()
    await begun.done()


async def test_many_turns_at_once_stay_apart() -> None:
    served = Served()
    begun = [await served.begin() for _ in range(8)]
    for index in range(4):
        served.engine.step(FinishReason.LENGTH if index == 3 else None)
    await asyncio.gather(*(one.done() for one in begun))
    assert all(tokens(one.lines) == [0, 1, 2, 3] for one in begun)


async def test_with_kept_kv_tokens_say_how_old_it_may_be_and_prefixes_are_not_shared() -> None:
    served = Served()
    begun = await served.begin(cache_salt="mine")
    served.engine.step()
    await settle()
    served.engine.weight_version = "4"
    served.turns.ages.activated(4, kept_kv=True)
    served.engine.step()
    later = await served.begin(request_id="later", cache_salt="mine")
    unsalted = await served.begin(request_id="unsalted")
    served.engine.step()
    await settle()
    served.engine.weight_version = "5"
    served.turns.ages.activated(5, kept_kv=False)
    served.engine.step(FinishReason.STOP)
    await asyncio.gather(begun.done(), later.done(), unsalted.done())
    stamps = [(line["version"], line.get("oldest_version")) for line in begun.lines]
    assert stamps == [(0, None), (4, 0), (4, 0), (5, None)]
    assert all("oldest_version" not in line for line in later.lines)
    salts = [prompt.get("cache_salt") for prompt in served.engine.prompts]
    assert salts == ["mine", "4/mine", "4/"]
    await served.begin(request_id="after")
    assert served.engine.prompts[-1].get("cache_salt") is None, "nothing old is left to hide"


@pytest.mark.parametrize("how", ["opens", "drained", "client gone"])
async def test_a_held_turn_begins_ends_or_is_forgotten(how: str) -> None:
    served = Served()
    with served.turns.hold.closed():
        begun = await served.begin()
        assert served.engine.live == 0
        if how == "drained":
            assert await served.turns.revoke_all() == 1
            assert (await begun.done()).lines == [{"finish_reason": "revoked"}]
        if how == "client gone":
            begun.leave()
            await begun.done()
        assert await served.turns.all_ended(0.01), "held turns are not in the engine"
    await settle()
    assert served.engine.live == (how == "opens")
    if how == "opens":
        served.engine.step(FinishReason.STOP)
        assert (await begun.done()).lines[-1]["finish_reason"] == "stop"
    assert await served.turns.all_ended(0.01)


async def test_an_engine_that_sends_spans_is_told_of_a_turns_trace() -> None:
    said = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1"}
    served = Served()
    begun = exchange(served.app, PATH, BODY, headers=said)
    await settle()
    # vLLM says of each turn's trace that it sends no spans, unless it does.
    assert served.engine.traces == [None]
    config = SimpleNamespace(otlp_traces_endpoint="http://collector")
    served.engine.observability_config = config
    other = exchange(served.app, PATH, BODY | {"request_id": "q"}, headers=said)
    await settle()
    assert served.engine.traces == [None, said]
    for each in (begun, other):
        each.leave()
        await each.done()
