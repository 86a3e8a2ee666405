"""Turns and batches of turns: each token once, with its logprob and version, sampled as asked."""

import pytest

pytest.importorskip("vllm")

import asyncio
import base64
import json
import struct
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from rose.contract.replica import MAX_BODY_BYTES, Sampling, StreamLine
from rose.replica import engine as engine_module
from rose.replica import vllm as vllm_module
from rose.replica.admission import Admission
from rose.replica.asgi import AccessFilter
from rose.replica.endpoint import GenerateApp
from rose.replica.token_versions import KvStaleness
from rose.replica.turns import Turns
from rose.replica.vllm import VllmEngine, VllmRequest, _places, ends_of
from tests.fakes.asgi_client import AsgiExchange, exchange, settle
from tests.fakes.async_llm import FakeAsyncLLM, logprob_of

PATH = "/rose/v1/generate"
BATCH = "/rose/v1/generate_batch"
LEAVE = "/rose/v1/generate_batch/leave"
BODY = {"request_id": "r", "token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}


class ServedTurns:
    """An engine's turns, under a lease of `job`."""

    def __init__(self, stream_interval: int = 1, job: str = "") -> None:
        self.engine = FakeAsyncLLM(stream_interval)
        self.admission = Admission()
        self.admission.admit(1, job)
        self.app = GenerateApp(self.admission)
        self.turns = self.app.turns = Turns(VllmEngine(self.engine))

    async def begin(self, path: str = PATH, **changes: Any) -> AsgiExchange:
        begun = exchange(self.app, path, BODY | changes)
        await settle()
        return begun

    async def begin_batch(self, *turns: dict[str, Any]) -> AsgiExchange:
        begun = exchange(self.app, BATCH, {"batch": "b", "turns": turns})
        await settle()
        return begun

    async def step(self, finish: FinishReason | None = None) -> None:
        self.engine.step(finish)
        await settle()


def tokens(lines: list[dict[str, Any]]) -> list[int]:
    return [token for line in lines for token in line.get("token_ids", [])]


async def test_each_step_is_one_chunk_with_its_logprobs_and_the_finish_comes_along() -> None:
    served = ServedTurns()
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
    served = ServedTurns(stream_interval)
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
    served = ServedTurns()
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
    served = ServedTurns(stream_interval)
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
    served = ServedTurns()
    served.engine.adding.clear()
    begun = await served.begin()
    assert await served.turns.revoke_all() == 1
    served.engine.adding.set()
    await begun.done()
    assert begun.lines == [{"finish_reason": "revoked"}]
    assert served.engine.live == 0


async def test_of_a_turn_that_was_ended_before_the_engine_had_it_no_token_is_heard() -> None:
    served = ServedTurns()
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
    served = ServedTurns()
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
    served = ServedTurns()
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
    served = ServedTurns()
    served.engine.refuse_with = failure
    begun = await served.begin()
    await begun.done()
    assert begun.status == status
    assert served.turns.waiting == 0


async def test_a_dead_engine_ends_its_turns_with_an_error() -> None:
    served = ServedTurns()
    begun = await served.begin()
    served.engine.step()
    await settle()
    served.engine.output_processor.propagate_error(EngineDeadError())
    await begun.done()
    assert [line.get("finish_reason") for line in begun.lines] == [None, "error"]


async def test_bodies_are_checked() -> None:
    served = ServedTurns()
    assert (await exchange(served.app, PATH, {"request_id": "r"}).done()).status == 400
    assert (await exchange(served.app, PATH, b"x" * (MAX_BODY_BYTES + 1)).done()).status == 413


async def test_sampling_is_that_of_the_request_and_only_stop_tokens_stop() -> None:
    served = ServedTurns()
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
    served = ServedTurns()
    begun = [await served.begin() for _ in range(8)]
    for index in range(4):
        served.engine.step(FinishReason.LENGTH if index == 3 else None)
    await asyncio.gather(*(one.done() for one in begun))
    assert all(tokens(one.lines) == [0, 1, 2, 3] for one in begun)


async def test_with_kept_kv_tokens_say_how_old_it_may_be_and_prefixes_are_not_shared() -> None:
    served = ServedTurns()
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
    served = ServedTurns()
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
    served = ServedTurns()
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


# ---- batches ----


def turn(number: int, **changes: Any) -> dict[str, Any]:
    asked = {"request_id": f"r{number}", "token_ids": [1, 2], "sampling": {"max_tokens": 8}}
    return asked | changes


def of(begun: AsgiExchange, place: int) -> list[dict[str, Any]]:
    return [line for at, line, *_ in begun.lines if at == place]


async def test_the_lines_of_one_step_are_one_piece_and_each_token_has_its_version() -> None:
    served = ServedTurns(job="mine")
    begun = await served.begin_batch(turn(0), turn(1), turn(2))
    await served.step()
    served.engine.weight_version = "7"
    await served.step()
    await served.step(FinishReason.LENGTH)
    await begun.done()
    for place in range(3):
        *chunks, last = of(begun, place)
        stamps = [(c["token_ids"], c["version"]) for c in chunks]
        assert stamps == [([0], 0), ([1], 7), ([2], 7)]
        assert last == {"finish_reason": "length"}
    assert begun.sends == 4, "headers, two pieces, and the last one"
    assert served.turns.tokens_total == 9
    assert not served.engine.core_aborts


async def test_a_drain_ends_each_of_them_after_the_tokens_that_it_has() -> None:
    served = ServedTurns(job="mine")
    begun = await served.begin_batch(turn(0), turn(1))
    await served.step()
    served.admission.close(1, "over")
    assert await served.turns.revoke_all() == 2
    await begun.done()
    for place in range(2):
        assert [line.get("finish_reason") for line in of(begun, place)] == [None, "revoked"]
        assert of(begun, place)[0]["token_ids"] == [0]


async def test_one_of_a_batch_that_is_left_ends_alone() -> None:
    served = ServedTurns(job="mine")
    begun = await served.begin_batch(turn(0), turn(1))
    await served.step()
    left = await exchange(served.app, LEAVE, {"batch": "b", "turns": [1, 7]}).done()
    await settle()
    assert (left.status, served.engine.live) == (200, 1)
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert [line.get("token_ids") for line in of(begun, 0)] == [[0], [1], None]
    assert [line.get("token_ids") for line in of(begun, 1)] == [[0]]
    assert len(served.engine.core_aborts) == 1


async def test_a_name_that_nobody_gave_ends_nothing() -> None:
    served = ServedTurns(job="mine")
    begun = await served.begin_batch(turn(0), turn(1))
    left = await exchange(served.app, LEAVE, {"batch": "c", "turns": [0, 1]}).done()
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert left.status == 200
    assert [len(of(begun, place)) for place in range(2)] == [2, 2]


async def test_a_client_that_hangs_up_on_a_batch_leaves_nothing_in_the_engine() -> None:
    served = ServedTurns(job="mine")
    begun = await served.begin_batch(turn(0), turn(1))
    await served.step()
    begun.leave()
    await begun.done()
    assert served.engine.live == 0
    assert (served.turns.running, served.turns.waiting) == (0, 0)


async def test_one_of_another_job_is_refused_alone() -> None:
    served = ServedTurns(job="mine")
    begun = await served.begin_batch(turn(0, job="mine"), turn(1, job="other"))
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert [at for at, *_ in begun.lines] == [1, 0, 0]
    assert begun.lines[0] == [1, {"message": "no turns of other here"}, 503]


async def test_what_the_engine_refuses_is_refused_alone() -> None:
    served = ServedTurns(job="mine")
    served.engine.adding.clear()
    begun = await served.begin_batch(
        turn(0), turn(1, sampling={"max_tokens": 8, "temperature": -1.0})
    )
    served.engine.adding.set()
    await settle()
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert begun.status == 200
    (refusal,) = [line for line in begun.lines if line[0] == 1]
    assert refusal[2] == 400
    assert of(begun, 0)[-1] == {"finish_reason": "length"}
    served.engine.refuse_with = VLLMValidationError("no")
    begun = await served.begin_batch(turn(2), turn(3))
    await begun.done()
    assert [line[2] for line in begun.lines] == [400, 400]


async def test_without_a_lease_all_are_refused_at_once() -> None:
    served = ServedTurns(job="mine")
    served.admission.close(1, "held")
    begun = await (await served.begin_batch(turn(0), turn(1))).done()
    assert begun.status == 503
    assert begun.json["error"]["type"] == "draining"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        {"batch": "b"},
        {"batch": "b", "turns": []},
        {"batch": "b", "turns": [{"request_id": "r"}]},
        {"batch": "b", "turns": [turn(0)] * 257},
    ],
)
async def test_a_body_that_is_no_batch_is_a_bad_request(body: object) -> None:
    served = ServedTurns(job="mine")
    assert (await exchange(served.app, BATCH, body).done()).status == 400
    assert (await exchange(served.app, LEAVE, {"turns": [-1]}).done()).status == 400
    assert served.engine.live == 0


async def test_a_weight_update_lets_none_of_them_begin_meanwhile() -> None:
    served = ServedTurns(job="mine")
    with served.turns.hold.closed():
        begun = await served.begin_batch(turn(0), turn(1))
        assert served.engine.live == 0
        await exchange(served.app, LEAVE, {"batch": "b", "turns": [1]}).done()
    await settle()
    assert served.engine.live == 1
    await served.step(FinishReason.LENGTH)
    await asyncio.wait_for(begun.done(), 2)
    assert of(begun, 1) == []


# ---- sampling ----


def sampled(**sampling: Any) -> dict[str, Any]:
    return BODY | {"sampling": {"max_tokens": 8, **sampling}}


async def test_penalties_and_structure_are_vllms() -> None:
    served = ServedTurns()
    asked = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "prompt_logprobs": 2,
    }
    begun = exchange(served.app, PATH, sampled(**asked, structured_outputs={"choice": ["a", "b"]}))
    await settle()
    (parameters,) = served.engine.parameters
    assert {name: getattr(parameters, name) for name in asked} == asked
    assert parameters.structured_outputs is not None
    assert parameters.structured_outputs.choice == ["a", "b"]
    begun.leave()
    await begun.done()


def model(folder: Path, ends: object, of_config: object, of_tokenizer: int | None) -> FakeAsyncLLM:
    """An engine whose model names its ends in all the places that there are."""
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    engine = FakeAsyncLLM()
    engine.model_config.model = str(folder)
    engine.model_config.hf_config.eos_token_id = of_config
    engine.renderer = SimpleNamespace(get_eos_token_id=lambda: of_tokenizer)
    return engine


@pytest.mark.parametrize(
    ("ends", "of_config", "of_tokenizer", "found"),
    [
        (None, None, None, ()),
        (None, 7, None, (7,)),
        (None, [7, 9], None, (7, 9)),
        ([5, 6], 7, None, (5, 6)),
        (5, 7, 8, (5, 8)),
        # The fake's vocabulary has 96 tokens: what lies outside is never sampled.
        (None, 1_000, 95, (95,)),
    ],
)
def test_the_ends_of_a_sequence_are_those_that_vllm_has_by_default(
    tmp_path: Path, ends: Any, of_config: Any, of_tokenizer: Any, found: Any
) -> None:
    assert ends_of(model(tmp_path, ends, of_config, of_tokenizer)) == found


async def test_a_turn_ends_at_them_unless_it_ignores_them(tmp_path: Path) -> None:
    engine = model(tmp_path, [5, 6], None, None)
    served = ServedTurns()
    served.app.turns = Turns(VllmEngine(engine))
    for sampling in ({"stop_token_ids": [9, 5]}, {"stop_token_ids": [9], "ignore_eos": True}):
        begun = exchange(served.app, PATH, sampled(**sampling))
        await settle()
        begun.leave()
        await begun.done()
    assert [each.stop_token_ids for each in engine.parameters] == [[9, 5, 6], [9]]


async def test_a_prompts_logprobs_come_before_its_first_token_in_short_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "PROMPT_PLACES", 2)
    found = [
        {},
        {2: SimpleNamespace(logprob=-0.5, rank=1), 8: SimpleNamespace(logprob=-2.0, rank=2)},
        {3: SimpleNamespace(logprob=-0.25, rank=1)},
    ]
    request = VllmRequest(
        SimpleNamespace(request_id="r"), None, KvStaleness(), 4, Sampling(prompt_logprobs=1)
    )
    first = StreamLine([9], [-1.0], 4)
    *lines, last = request._delta([first], None, lambda: _places(found)).chunks
    assert [line.prompt_logprobs for line in lines] == [
        [None, [(2, -0.5, 1), (8, -2.0, 2)]],
        [[(3, -0.25, 1)]],
    ]
    assert {line.version for line in lines} == {4}
    assert last == first


@pytest.mark.parametrize("stream_interval", [1, 3])
@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 3])
async def test_the_most_likely_tokens_come_with_each_token(
    monkeypatch: pytest.MonkeyPatch, stream_interval: int, unread: bool, rank: int
) -> None:
    monkeypatch.setattr(engine_module, "LINE_COLUMN_BYTES", 70)
    served = ServedTurns(stream_interval)
    served.engine.rank = rank
    plain = await served.begin(request_id="plain")
    begun = await served.begin(sampling={"max_tokens": 9, "logprobs": 4})
    states = served.engine.output_processor.request_states
    (asking,) = [state for state in states.values() if state.logprobs_processor.num_logprobs]
    for last in range(7):
        served.engine.step(FinishReason.STOP if last == 6 else None)
        if not unread:
            await settle()
            assert len(asking.logprobs_processor.logprobs) < stream_interval
    await begun.done()
    await plain.done()
    assert tokens(begun.lines) == tokens(plain.lines) == [*range(7)]
    assert not any("top_logprobs" in line for line in plain.lines)
    likely = {1: (99, -9.0), 2: (100, -10.0), 3: (101, -11.0), 4: (102, -12.0)}
    for line in begun.lines:
        rows = b""
        for token in line.get("token_ids", ()):
            own = {rank: (token, logprob_of(token))} if rank else {}
            ids, values = zip(*(likely | own).values(), strict=True)
            rows += struct.pack("<4i4f", *ids, *values)
        assert base64.b64decode(line.get("top_logprobs", "")) == rows
        assert len(rows) <= 70


def routes_of(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(
        base64.b64decode(line["routed_experts"][3]) for line in lines if "routed_experts" in line
    )


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("stream_interval", [1, 3])
@pytest.mark.parametrize("unread", [False, True])
async def test_experts_of_each_position_come_once(
    monkeypatch: pytest.MonkeyPatch, start: int, stream_interval: int, unread: bool
) -> None:
    monkeypatch.setattr(engine_module, "LINE_COLUMN_BYTES", 9)
    served = ServedTurns(stream_interval)
    served.engine.vllm_config.aux_output_config.enable_return_routed_experts = True
    plain = await served.begin(request_id="plain")
    begun = await served.begin(sampling={"max_tokens": 9, "routed_experts_prompt_start": start})
    for _ in range(5):
        served.engine.step()
        if not unread:
            await settle()
    await served.turns.revoke_all()
    await begun.done()
    await plain.done()
    assert tokens(begun.lines) == [*range(5)]
    # The prompt has three tokens; the last one's position is the last without experts.
    expected = b"".join(bytes([p, p + 1, p + 2, p + 3]) for p in range(start, 3 + 5 - 1))
    assert routes_of(begun.lines) == expected
    assert not any("routed_experts" in line for line in plain.lines)
    for line in begun.lines:
        if line.get("token_ids"):
            assert len(base64.b64decode(line["routed_experts"][3])) == 4 * len(line["token_ids"])
    assert [each.routed_experts_prompt_start for each in served.engine.parameters] == [3, start]


async def test_experts_of_a_prompt_that_two_versions_may_share_are_asked_for_again() -> None:
    served = ServedTurns()
    served.engine.vllm_config.aux_output_config.enable_return_routed_experts = True
    begun = await served.begin(sampling={"max_tokens": 9, "routed_experts_prompt_start": 0})
    served.engine.weight_version = "4"
    served.turns.ages.activated(4, kept_kv=True)
    served.engine.step(FinishReason.STOP)
    await begun.done()
    assert begun.lines == [{"finish_reason": "abort"}]


async def test_an_engine_without_experts_refuses_a_turn_that_asks_for_them() -> None:
    served = ServedTurns()
    begun = await served.begin(sampling={"routed_experts_prompt_start": 0})
    await begun.done()
    assert begun.status == HTTPStatus.BAD_REQUEST
    assert begun.json["error"]["message"].startswith("routed_experts: the engine gives none")
    assert not served.engine.prompts


@pytest.mark.parametrize(("flag", "gpu", "begins"), [(1, 1, True), (1, 0, False), (0, 1, False)])
async def test_a_deterministic_turn_begins_on_a_batch_invariant_engine_alone(
    monkeypatch: pytest.MonkeyPatch, flag: int, gpu: int, *, begins: bool
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(flag))
    platform = SimpleNamespace(is_cuda=lambda: bool(gpu))
    monkeypatch.setattr(vllm_module, "current_platform", platform)
    served = ServedTurns()
    begun = await served.begin(sampling={"deterministic": True, "temperature": 0})
    if begins:
        served.engine.step(FinishReason.STOP)
    await begun.done()
    assert bool(served.engine.prompts) is begins
    if not begins:
        assert begun.status == HTTPStatus.BAD_REQUEST
        assert begun.json["error"]["message"] == vllm_module.VARIES


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
async def test_logprobs_of_more_tokens_than_there_are_do_not_reach_the_engine(name: str) -> None:
    served = ServedTurns()
    begun = await served.begin(sampling={name: 97})
    await begun.done()
    assert begun.status == HTTPStatus.BAD_REQUEST
    assert f"{name}: 97 is above the vocabulary's 96 tokens" in begun.json["error"]["message"]
    assert not served.engine.prompts


async def test_logprobs_of_a_prompt_that_two_versions_may_share_are_asked_for_again() -> None:
    served = ServedTurns()
    begun = exchange(served.app, PATH, sampled(prompt_logprobs=0))
    await settle()
    served.engine.weight_version = "4"
    served.turns.ages.activated(4, kept_kv=True)
    served.engine.step(FinishReason.STOP)
    await begun.done()
    assert begun.lines == [{"finish_reason": "abort"}]


@pytest.mark.parametrize(
    ("leased", "job", "status"),
    [("", "", 204), ("a", "a", 204), ("a", "", 204), ("a", "b", 503), (None, "", 503)],
)
async def test_models_that_are_not_generative_serve_the_job_of_the_lease(
    monkeypatch: pytest.MonkeyPatch, leased: str | None, job: str, status: int
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "guest")
    admission = Admission()
    if leased is not None:
        admission.admit(1, leased)
    gate = GenerateApp(admission)
    gate.turns = Turns(VllmEngine(FakeAsyncLLM()))
    said: list[int] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            said.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/pooling",
        "query_string": f"rose_job={job}".encode(),
        "headers": [],
        "app": SimpleNamespace(state=SimpleNamespace(rose_generate=gate)),
    }
    await AccessFilter(vllm)(scope, None, send)
    assert said == [status]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_ids": [1, 2**31 - 1]}, "token_ids: 2147483647 is not one of"),
        ({"sampling": {"allowed_token_ids": [5, 4_000_000]}}, "allowed_token_ids: 4000000"),
        ({"sampling": {"min_tokens": 2, "stop_token_ids": [4_000_000]}}, "stop_token_ids: 4000000"),
        (
            sampled(structured_outputs={"regex": "a", "json": "{}"}),
            "one kind of structured outputs",
        ),
    ],
)
async def test_ids_and_structures_that_vllm_does_not_take_never_reach_the_engine(
    change: dict[str, Any], named: str
) -> None:
    served = ServedTurns()
    refused = exchange(served.app, PATH, sampled() | change)
    await refused.done()
    assert refused.status == 400
    assert named in refused.received.decode()
    assert not served.engine.parameters
