"""Replicas with drafts sample what replicas without drafts sample, under any grant and version."""

import asyncio
import importlib.util
import json
import math
from collections import Counter
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract_engines import VLLM
from guest_rig import Rig, client_of, started
from live_replica import PROMPT, Replica, sampled, tokens_of

from rose.engines import EngineRole
from tests.engine.families.tiny_families import add_head, make_family

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

DRAFTED = 3
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "suffix_decoding_min_token_prob": 0.01}
no_suffix = importlib.util.find_spec("arctic_inference") is None
REPLICAS = [
    pytest.param((EngineRole.GUEST, NGRAM), id="guest, n-gram"),
    pytest.param((EngineRole.DEDICATED, NGRAM), id="dedicated, n-gram", marks=pytest.mark.nightly),
    pytest.param(
        (EngineRole.DEDICATED, SUFFIX),
        id="dedicated, suffix",
        marks=pytest.mark.skipif(no_suffix, reason="pip install arctic-inference"),
    ),
]
PAIR = (5, 9)
"""The only tokens that are allowed where frequencies are counted; drafts are often wrong there."""
ALTERNATING = [*PAIR * 32, PAIR[0]]
"""Prompt of two blocks and a token: all of it but that token is in the cache the second time."""
TURNS, LENGTH = 2400, 4
REPEATS = [*range(40, 60)] * 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with started(VLLM, tmp_path_factory.mktemp("plain"), EngineRole.DEDICATED) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=REPLICAS)
async def rig(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    role, drafts = request.param
    option = f"--speculative-config={json.dumps({**drafts, 'num_speculative_tokens': DRAFTED})}"
    folder = tmp_path_factory.mktemp("drafting")
    async with started(VLLM, folder, role, extra_args=(option,)) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def replica(rig: Rig) -> AsyncIterator[Replica]:
    async with client_of(rig) as replica:
        yield replica


@pytest_asyncio.fixture(loop_scope="module")
async def plain(plain_rig: Rig) -> AsyncIterator[Replica]:
    async with client_of(plain_rig) as replica:
        yield replica


def prompts() -> list[list[int]]:
    """Prompts with and without repetitions, and one that is longer than a block by a token."""
    return [PROMPT, REPEATS, ALTERNATING, [7] * 40]


async def greedy(replica: Replica, salt: str) -> list[list[tuple[int, float]]]:
    """Tokens with logprobs of all prompts at once, twice: the second time from the cache."""
    answers = []
    for _ in range(2):
        turns = (replica.lines(prompt, 48, salt=salt) for prompt in prompts())
        answers += [sampled(lines) for lines in await asyncio.gather(*turns)]
    return answers


def same(left: list[list[tuple[int, float]]], right: list[list[tuple[int, float]]]) -> None:
    for ours, theirs in zip(left, right, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [logprob for _, logprob in ours] == pytest.approx(
            [logprob for _, logprob in theirs], abs=1e-3
        )


async def update(replica: Replica, plain: Replica, seed: int) -> None:
    """Give both the same new version."""
    new = plain.engine.versions.changed(seed)
    for each in (replica, plain):
        await each.apply(each.engine.versions.next(new))


async def test_greedy_tokens_are_those_without_drafts_under_each_version(
    replica: Replica, plain: Replica
) -> None:
    for seed in (1, 2):
        await update(replica, plain, seed)
        same(await greedy(replica, f"{seed}"), await greedy(plain, f"{seed}"))


async def chance(plain: Replica, tokens: tuple[int, ...]) -> float:
    """Probability with which a replica without drafts samples the last of these tokens."""
    lines = await plain.lines(
        [*ALTERNATING, *tokens[:-1]], 1, temperature=1.0, allowed_token_ids=PAIR, seed=1
    )
    ((token, logprob),) = sampled(lines)
    likely = math.exp(logprob)
    return likely if token == tokens[-1] else 1 - likely


async def as_often(replica: Replica, plain: Replica) -> None:
    """With the bound of Bernstein, which one run of ten million exceeds."""
    how = {"temperature": 1.0, "allowed_token_ids": PAIR}
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, TURNS, 200):
        seeds = range(first, first + 200)
        turns = (replica.lines(ALTERNATING, LENGTH, seed=seed, **how) for seed in seeds)
        counts.update(tuple(tokens_of(lines)) for lines in await asyncio.gather(*turns))
    outcomes = [*product(PAIR, repeat=LENGTH)]
    assert counts.keys() <= set(outcomes)
    logs = math.log(2 * len(outcomes) * 1e7)
    for tokens in outcomes:
        parts = [await chance(plain, tokens[: end + 1]) for end in range(LENGTH)]
        expected = math.prod(parts)
        bound = math.sqrt(2 * expected * (1 - expected) * logs / TURNS) + 2 * logs / (3 * TURNS)
        assert abs(counts[tokens] / TURNS - expected) < bound, tokens


async def test_a_grant_of_fewer_tokens_than_a_steps_drafts_holds_up_no_turn(
    rig: Rig, replica: Replica
) -> None:
    if rig.spec.role is not EngineRole.GUEST:
        pytest.skip("a dedicated replica has no grant")
    whole = [tokens_of(await replica.lines(prompt, 24, salt="whole")) for prompt in prompts()]
    await rig.grants(token_budget=2)
    async with asyncio.timeout(60):
        # A token of the prompt is left to compute: vLLM would wait for room for its drafts.
        cut = [tokens_of(await replica.lines(prompt, 24, salt="whole")) for prompt in prompts()]
    assert cut == whole


async def test_drafts_save_steps_and_each_token_counts_once(rig: Rig, replica: Replica) -> None:
    if rig.spec.role is not EngineRole.GUEST:
        pytest.skip("a dedicated replica has no page")
    before = rig.state
    assert len(tokens_of(await replica.lines(ALTERNATING, 48))) == 48
    after = rig.state
    counted = after.tokens_total - before.tokens_total
    assert 48 <= counted <= 48 + DRAFTED, "those after the last one were sampled and not sent"
    assert after.step_seq - before.step_seq < 48, "drafts save steps"


async def test_what_a_sampler_of_drafts_cannot_is_refused(replica: Replica) -> None:
    body = {"request_id": "no", "token_ids": PROMPT, "sampling": {"min_p": 0.5}}
    status, said = await replica.call("generate", body)
    assert status == 400
    assert "min_p" in said["error"]["message"]


async def test_tokens_come_as_often_as_without_drafts(replica: Replica, plain: Replica) -> None:
    await update(replica, plain, 3)
    await as_often(replica, plain)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["mtp", "eagle"])
async def test_what_drafts_is_updated_and_changes_no_token(tmp_path: Path, method: str) -> None:
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    for name in ("plain", "drafting"):
        folder = tmp_path / name / "model"
        make_family("glm4-moe-mtp" if method == "mtp" else "llama", folder, "float32")
        if method != "mtp":
            drafts["model"] = str(add_head(folder))
    option = f"--speculative-config={json.dumps(drafts)}"
    async with (
        started(VLLM, tmp_path / "drafting", extra_args=(option,)) as rig,
        started(VLLM, tmp_path / "plain", EngineRole.DEDICATED) as plain_rig,
        client_of(rig) as replica,
        client_of(plain_rig) as plain,
    ):
        for seed in (1, 2):
            await update(replica, plain, seed)
            same(await greedy(replica, f"{seed}"), await greedy(plain, f"{seed}"))
            status, found = await replica.call("weights/audit", {})
            assert (status, found["flipped"], found["unjudged"]) == (200, [], []), found
        _, beside = await plain.call("weights/audit", {})
        assert found["weights"] > beside["weights"], "what drafts is read too"
        await as_often(replica, plain)
