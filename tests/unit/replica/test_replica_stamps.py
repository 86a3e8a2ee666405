"""Each token with its version and its own logprob, whatever vLLM sends along or does not."""

import pytest

pytest.importorskip("vllm")

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.exceptions import EngineGenerateError

from rose.contract.replica import Sampling
from rose.replica.token_versions import KvStaleness, split_spans
from rose.replica.vllm import CountedStamps, VllmRequest, stamps_of

# ---- versions, counted where outputs come in ----


class Collector:
    """Receiver of a request's outputs."""


class StampingEngine:
    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.output_processor = SimpleNamespace(request_states=self.requests)
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())

    def add(self, name: str) -> Collector:
        collector = Collector()
        self.requests[name] = SimpleNamespace(queue=collector)
        return collector

    def step(self, **tokens: int) -> None:
        """Put a message of the core as vLLM's client puts it."""
        outputs = [
            SimpleNamespace(request_id=name, new_token_ids=[0] * count)
            for name, count in tokens.items()
        ]
        self.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=outputs))


async def test_tokens_are_of_the_version_under_which_they_came_in() -> None:
    engine = StampingEngine()
    queue = engine.engine_core.outputs_queue
    stamps = CountedStamps(engine)
    one, two = engine.add("one"), engine.add("two")
    engine.step(one=1, two=3)
    engine.step(one=1, unknown=5)
    early = stamps.starts(one)
    await stamps.activate(7)
    # Nobody has taken out of the queue what came before: it is of the old version all the same.
    assert queue.qsize() == 2
    engine.step(one=2)
    engine.step(one=0)
    await stamps.activate(8)
    engine.step(one=1, two=1)
    assert early == [("default", 0), ("7", 2), ("8", 4)]
    assert stamps.starts(two) == [("default", 0), ("8", 3)]
    assert split_spans(early, 0, 5) == [(0, 0, 2), (7, 2, 4), (8, 4, 5)]
    assert queue.qsize() == 5, "everything is handed on"


async def test_a_request_that_began_before_an_update_and_has_no_token_is_of_the_new_version() -> (
    None
):
    engine = StampingEngine()
    stamps = CountedStamps(engine)
    starts = stamps.starts(engine.add("late"))
    assert starts == []
    await stamps.activate(3)
    engine.step(late=1)
    assert starts == [("3", 0)]


async def test_the_end_of_a_request_forgets_it_and_a_dead_engine_is_told() -> None:
    engine = StampingEngine()
    stamps = CountedStamps(engine)
    engine.add("gone")
    engine.step(gone=4)
    assert len(stamps) == 1
    engine.requests.clear()
    gc.collect()
    assert len(stamps) == 0
    dead = RuntimeError("the core died")
    engine.engine_core.outputs_queue.put_nowait(dead)
    assert [engine.engine_core.outputs_queue.get_nowait() for _ in range(2)][1] is dead


def test_an_engine_has_one_book() -> None:
    engine = StampingEngine()
    assert stamps_of(engine) is stamps_of(engine)


def test_the_book_of_an_engine_does_not_keep_it() -> None:
    engine = StampingEngine()
    stamps_of(engine)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


# ---- logprobs ----


def output(tokens: list[int], logprobs: list[float], finish_reason: str | None = None) -> Any:
    flat = FlatLogprobs()
    flat.logprobs = logprobs
    flat.start_indices = list(range(len(logprobs)))
    completion = SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=finish_reason)
    return SimpleNamespace(outputs=[completion])


def request_with(*outputs: Any) -> VllmRequest:
    waiting = iter(outputs)
    collector = SimpleNamespace(request_id="r", get_nowait=lambda: next(waiting))
    return VllmRequest(collector, [("default", 0)], KvStaleness(), 0, Sampling())


async def test_an_end_without_a_token_repeats_no_logprobs() -> None:
    """vLLM 0.25 merges it with tokens that were not read yet: its own are all of them."""
    request = request_with(
        output([1, 2], [-0.1, -0.2]),
        output([3, 4], [-0.3, -0.4, -0.1, -0.2, -0.3, -0.4], "abort"),
    )
    chunks = [chunk for _ in range(2) for chunk in (await request.next()).chunks]
    assert [(chunk.token_ids, chunk.logprobs) for chunk in chunks] == [
        ([1, 2], [-0.1, -0.2]),
        ([3, 4], [-0.3, -0.4]),
    ]


@pytest.mark.parametrize(
    ("logprobs", "end"),
    [([-0.3], "abort"), ([-0.3] * 6, None), ([-0.3] * 5, "stop"), ([-0.3] * 7, "stop")],
)
async def test_logprobs_that_cannot_be_told_apart_are_an_error(
    logprobs: list[float], end: str | None
) -> None:
    request = request_with(output([1, 2], [-0.1, -0.2]), output([3, 4], logprobs, end))
    await request.next()
    with pytest.raises(EngineGenerateError, match="2 tokens came with"):
        await request.next()
