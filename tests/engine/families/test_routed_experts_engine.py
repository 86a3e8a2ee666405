"""Experts that a real vLLM reports, of moved turns too: those that transformers chooses."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_families import VOCABULARY, make_family

from rose.contract.replica import GenerateBody, Sampling, StreamLine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

TOKENS, MOVED_AFTER = 40, 17
# Two of them begin alike: the prefix cache has the first blocks of the second one.
SHARED = [(11 * k + 5) % VOCABULARY for k in range(70)]
PROMPTS = [[*SHARED, 3, 9], [*SHARED, 401], [7, 8, 9]]
WANTED = Sampling(
    temperature=0.0, max_tokens=TOKENS, ignore_eos=True, routed_experts_prompt_start=0
)


def engine_of(folder: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        kv_cache_memory_bytes=96 << 20,
        max_model_len=256,
        max_num_seqs=8,
        logprobs_mode="processed_logprobs",
        enable_return_routed_experts=True,
    )
    return AsyncLLM.from_engine_args(arguments)


async def read(replica: Any, body: GenerateBody, most: int) -> list[StreamLine]:
    """Return the lines of a turn, which is revoked once it has `most` tokens."""
    from rose.replica.token_versions import KvStaleness

    request, lines, reason = await replica.start(body, KvStaleness()), [], None
    while reason is None:
        if request.tokens >= most:
            await replica.abort([request])
        delta = await request.next()
        lines += delta.chunks
        reason = delta.finish_reason
    return lines


async def moved(replica: Any, name: str, prompt: list[int], most: int) -> tuple[list[int], bytes]:
    """Return the tokens and experts of a turn that goes on from its tokens once it has `most`."""
    lines = await read(replica, GenerateBody(name, prompt, WANTED), most)
    tokens = [token for line in lines for token in line.token_ids]
    if len(tokens) < TOKENS:
        so_far = [*prompt, *tokens]
        rest = GenerateBody(f"{name}.2", so_far, WANTED.rest(TOKENS - len(tokens), len(so_far)))
        lines += await read(replica, rest, TOKENS)
        tokens = [token for line in lines for token in line.token_ids]
    found = [line.routed_experts for line in lines if line.routed_experts is not None]
    assert {(each.layers, each.choices, each.width) for each in found} == {(2, 2, 1)}
    return tokens, b"".join(each.data for each in found)


async def turns(folder: Path) -> list[list[tuple[list[int], bytes]]]:
    from rose.replica.vllm import VllmEngine

    engine = engine_of(folder)
    try:
        replica = VllmEngine(engine)
        return [
            [
                *await asyncio.gather(
                    *[
                        moved(replica, f"{most}-{k}", prompt, most)
                        for k, prompt in enumerate(PROMPTS)
                    ]
                )
            ]
            for most in (TOKENS + 1, MOVED_AFTER)
        ]
    finally:
        engine.shutdown()


def chosen(folder: Path, tokens: list[int]) -> Any:
    """Return the experts of each position, in each layer, that transformers chooses, in order."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return np.stack([each.topk(2).indices.sort().values.numpy() for each in logits], axis=1)


def test_a_turns_experts_are_those_that_transformers_chooses(tmp_path: Path) -> None:
    if not pytest.importorskip("vllm.triton_utils").HAS_TRITON:
        pytest.skip("vLLM reports experts from its model runner V2 alone, which needs Triton")
    folder = make_family("qwen3-moe", tmp_path / "model")
    whole, parts = asyncio.run(turns(folder))
    for prompt, (tokens, data), (again, joined) in zip(PROMPTS, whole, parts, strict=True):
        assert len(tokens) == TOKENS
        assert (again, joined) == (tokens, data), "a turn that moved is the turn that did not"
        found = np.sort(np.frombuffer(data, np.uint8).reshape(-1, 2, 2))
        assert np.array_equal(found, chosen(folder, [*prompt, *tokens][:-1]))
