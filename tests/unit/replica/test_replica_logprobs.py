"""Each token with its own logprob, whatever else vLLM sends along."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.exceptions import EngineGenerateError

from rose.replica.token_versions import KvStaleness
from rose.replica.vllm import VllmRequest


def output(tokens: list[int], logprobs: list[float], finish_reason: str | None = None) -> Any:
    flat = FlatLogprobs()
    flat.logprobs = logprobs
    flat.start_indices = list(range(len(logprobs)))
    completion = SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=finish_reason)
    return SimpleNamespace(outputs=[completion])


def request_with(*outputs: Any) -> VllmRequest:
    waiting = iter(outputs)
    collector = SimpleNamespace(request_id="r", get_nowait=lambda: next(waiting))
    return VllmRequest(collector, [("default", 0)], KvStaleness(), 0)


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
