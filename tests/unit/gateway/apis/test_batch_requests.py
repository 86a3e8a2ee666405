"""Batches as trainers send them: hundreds of completions in one request, and names of models."""

import asyncio
from typing import Any

import pytest

from elastic_scheduler import End, TurnNeed
from rose.errors import ConfigError
from rose.gateway.errors import NoReplica
from rose.gateway.replicas.dispatcher import Dispatcher
from rose.gateway.settings import GatewaySettings, parse_settings
from rose.gateway.stats import GatewayStats
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import entry, failing_over, serving
from tests.unit.gateway.wire_cases import COMPLETIONS, VLLM, ask, get, vllm_body


def batch(prompts: int, samples: int, **fields: Any) -> dict[str, Any]:
    """The body of TRL's server mode: token prompts, each sampled several times."""
    return {
        "model": "trained/model",
        "prompt": [[1, 100 + k] for k in range(prompts)],
        "n": samples,
        "max_tokens": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        **fields,
    }


async def test_512_completions_of_one_request_are_answered_in_their_order() -> None:
    async with failing_over(model_names=("*",)) as (one, two, _, session):
        status, answer, _ = await ask(session, COMPLETIONS, batch(64, 8))
    assert status == 200
    assert len(one.requests) + len(two.requests) == 512
    found = [choice["token_ids"] for choice in answer["choices"]]
    assert found == [[101 + k, 102 + k] for k in range(64) for _ in range(8)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(512))


class Queue:
    """A dispatcher on a clock of the test's: one place, which is taken, and two turns behind it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        settings = GatewaySettings(port=0, scheduler="127.0.0.1:1")
        self.dispatcher = Dispatcher(
            settings, GatewayStats(), lambda: self.now_s, lambda *_, **__: None
        )
        self.dispatcher.set_table((entry(StandInReplica(), "own-0", max_sequences=1),))

    async def begin(self) -> None:
        self.first = await self.dispatcher.acquire(TurnNeed("", 2, 900))
        self.batch = self.wait(batch=True)
        self.alone = self.wait(batch=False)
        await asyncio.sleep(0)

    def wait(self, *, batch: bool) -> "asyncio.Task[object]":
        return asyncio.create_task(self.dispatcher.acquire(TurnNeed("", 2, 9), batch=batch))

    async def pass_by(self, seconds: int, *, tokens: bool) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            if tokens:
                self.dispatcher.journaled(self.first, 1)
            self.dispatcher.sweep()
            await asyncio.sleep(0)


async def test_a_batch_waits_for_its_places_as_long_as_tokens_come() -> None:
    queue = Queue()
    await queue.begin()
    await queue.pass_by(62, tokens=True)
    # A turn of its own waits no longer than ever.
    assert isinstance(queue.alone.exception(), NoReplica)
    await queue.pass_by(600, tokens=True)
    assert not queue.batch.done()
    queue.dispatcher.finish(queue.first, None)
    await queue.batch


@pytest.mark.parametrize(("with_tokens_s", "without_s"), [(100, 62), (3_602, 0)])
async def test_a_batch_whose_replicas_make_nothing_or_go_on_for_ever_is_given_up(
    with_tokens_s: int, without_s: int
) -> None:
    queue = Queue()
    await queue.begin()
    await queue.pass_by(with_tokens_s - 3, tokens=True)
    assert not queue.batch.done()
    await queue.pass_by(3, tokens=True)
    if without_s:
        await queue.pass_by(without_s - 3, tokens=False)
        assert not queue.batch.done()
        await queue.pass_by(3, tokens=False)
    error = queue.batch.exception()
    assert isinstance(error, NoReplica)
    assert "no replica was free" in str(error)


async def test_a_trajectory_without_a_prefix_waits_for_memory_and_others_pass_it() -> None:
    queue = Queue()
    row = entry(StandInReplica(), "own-0", max_sequences=9, kv_tokens=1_000)
    queue.dispatcher.set_table((row,))
    for session in ("back", "away"):
        turn = await queue.dispatcher.acquire(TurnNeed(session, 390, 10))
        queue.dispatcher.journaled(turn, 10)
        queue.dispatcher.finish(turn, End.FINISHED)
    queue.first = await queue.dispatcher.acquire(TurnNeed("", 90, 10))
    new, batched, moved, back = waits = [
        asyncio.create_task(queue.dispatcher.acquire(TurnNeed(*need), avoid, batch=batch))
        for need, avoid, batch in (
            (("new", 290, 10), "", False),
            (("batched", 290, 10), "", True),
            (("moved", 40, 10), "gone", True),
            (("back", 400, 10), "", False),
        )
    ]
    await asyncio.sleep(0)
    assert [task.done() for task in waits] == [False, False, True, True]
    await queue.pass_by(32, tokens=True)
    assert (new.done(), batched.done()) == (True, False), "half of --queue-wait-s is over"
    for live in (queue.first, moved.result(), back.result(), new.result()):
        queue.dispatcher.finish(live, None)
    await batched


async def test_a_batch_that_waits_for_a_version_is_not_looked_through_for_each_of_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, looked = Queue(), []
    pump = queue.dispatcher.pump
    monkeypatch.setattr(queue.dispatcher, "pump", lambda: (looked.append(1), pump()))
    newer = TurnNeed("", 2, 9, min_version=2)
    waits = [asyncio.create_task(queue.dispatcher.acquire(newer, batch=True)) for _ in range(200)]
    await asyncio.sleep(0)
    assert (queue.dispatcher.waiting, len(looked)) == (200, 1)
    row = entry(StandInReplica(version=2), "own-1", max_sequences=200)
    queue.dispatcher.set_table((row,))
    await asyncio.gather(*waits)


async def test_every_name_that_was_given_is_listed_and_others_are_refused_by_name() -> None:
    names = ("policy", "org/Model-7B")
    async with serving(name="own-0", model_names=names) as (_, _, session):
        cards = (await get(session, "/v1/models"))["data"]
        taken = [(await ask(session, VLLM, vllm_body(2, model=name)))[0] for name in (*names, None)]
        status, answer, _ = await ask(session, COMPLETIONS, batch(1, 1, model="other"))
    assert [card["id"] for card in cards] == list(names)
    assert taken == [200, 200, 200]
    assert status == 404
    assert answer["error"]["message"] == (
        "The model `other` does not exist. Valid aliases: policy, org/Model-7B."
    )


async def test_a_star_takes_any_name_and_lists_those_beside_it() -> None:
    async with serving(model_names=("policy", "*")) as (_, _, session):
        cards = (await get(session, "/v1/models"))["data"]
        status, answer, _ = await ask(session, COMPLETIONS, batch(1, 1, model="any/thing"))
    assert ([card["id"] for card in cards], status, answer["model"]) == (["policy"], 200, "policy")


def test_the_command_line_takes_several_names() -> None:
    here = ["--port", "0", "--replica", "http://127.0.0.1:1"]
    assert parse_settings(here).model_names == ("rose-policy",)
    more = ["--model-name", "a", "--model-name", "*"]
    assert parse_settings([*here, *more]).model_names == ("a", "*")
    with pytest.raises(ConfigError, match="a is given twice"):
        parse_settings([*here, "--model-name", "a", "--model-name", "a"])
    with pytest.raises(ConfigError, match="--model-name is empty"):
        parse_settings([*here, "--model-name", ""])
