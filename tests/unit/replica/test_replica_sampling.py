"""Sampling options of a turn, as a replica passes them to its engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from rose.contract.replica import StreamLine
from rose.replica import engine as engine_module
from rose.replica.admission import Admission
from rose.replica.asgi import AccessFilter
from rose.replica.endpoint import GenerateApp
from rose.replica.token_versions import KvStaleness
from rose.replica.turns import Turns
from rose.replica.vllm import VllmEngine, VllmRequest, _places, ends_of
from tests.fakes.asgi_client import exchange, settle
from tests.fakes.async_llm import FakeAsyncLLM

PATH = "/rose/v2/generate"


def served() -> tuple[FakeAsyncLLM, GenerateApp]:
    engine, admission = FakeAsyncLLM(), Admission()
    admission.admit(1)
    app = GenerateApp(admission)
    app.turns = Turns(VllmEngine(engine))
    return engine, app


def body(**sampling: Any) -> dict[str, Any]:
    return {"request_id": "r", "token_ids": [1, 2, 3], "sampling": {"max_tokens": 8, **sampling}}


async def test_penalties_and_structure_are_vllms() -> None:
    engine, app = served()
    asked = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "prompt_logprobs": 2,
    }
    begun = exchange(app, PATH, body(**asked, structured_outputs={"choice": ["a", "b"]}))
    await settle()
    (parameters,) = engine.parameters
    assert {name: getattr(parameters, name) for name in asked} == asked
    assert parameters.structured_outputs is not None
    assert parameters.structured_outputs.choice == ["a", "b"]
    begun.leave()
    await begun.done()


async def test_a_structure_that_vllm_does_not_take_is_400() -> None:
    _, app = served()
    refused = exchange(app, PATH, body(structured_outputs={"regex": "a", "json": "{}"}))
    await refused.done()
    assert refused.status == 400
    assert "one kind of structured outputs" in refused.received.decode()


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
    _, app = served()
    app.turns = Turns(VllmEngine(engine))
    for sampling in ({"stop_token_ids": [9, 5]}, {"stop_token_ids": [9], "ignore_eos": True}):
        begun = exchange(app, "/rose/v1/generate", body(**sampling))
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
    request = VllmRequest(SimpleNamespace(request_id="r"), None, KvStaleness(), 4, True)
    first = StreamLine([9], [-1.0], 4)
    *lines, last = request._delta([first], None, lambda: _places(found)).chunks
    assert [line.prompt_logprobs for line in lines] == [
        [None, [(2, -0.5, 1), (8, -2.0, 2)]],
        [[(3, -0.25, 1)]],
    ]
    assert {line.version for line in lines} == {4}
    assert last == first


async def test_logprobs_of_a_prompt_that_two_versions_may_share_are_asked_for_again() -> None:
    engine, app = served()
    begun = exchange(app, PATH, body(prompt_logprobs=0))
    await settle()
    engine.weight_version = "4"
    assert app.turns is not None
    app.turns.ages.activated(4, kept_kv=True)
    engine.step(FinishReason.STOP)
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
    ],
)
async def test_ids_outside_the_vocabulary_never_reach_the_engine(
    change: dict[str, Any], named: str
) -> None:
    engine, app = served()
    refused = exchange(app, PATH, body() | change)
    await refused.done()
    assert refused.status == 400
    assert named in refused.received.decode()
    assert not engine.parameters
