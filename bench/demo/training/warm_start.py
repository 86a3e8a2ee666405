"""Supervised warm start: a policy that knows the format and half of the way.

How much a policy learns in so many steps depends on the arithmetic of the machine that trains it.
So the warm start does not end after a number of steps, but when it crosses about half of the
validation lakes: wherever it is made, it leaves room for what reinforcement learning adds.
"""

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.data import demonstrate, evaluate
from bench.demo.frozen_lake.models import new_policy
from bench.demo.frozen_lake.task import different_lakes, random_lake
from bench.demo.training.forward import reply_bias, reply_logprobs
from bench.demo.training.rollouts import sampling
from rose.client import Sampling, Turn

STEPS = 250
BATCH = 32
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 20
SEED = 1_234
# Seeds of maps: training episodes, demonstrations and held-out maps never meet.
DEMONSTRATION_SEEDS = 1_000_000_000
VALIDATION_LAKES = 256
# Greedy success on the validation lakes at which the warm start ends.
LEAST_SUCCESS, MOST_SUCCESS = 0.45, 0.62
# Nothing is crossed before.
FIRST_CHECK, CHECK_EVERY = 90, 10
# Between one check and the next success may leap over the band: the way is then halved so often.
HALVINGS = 4
GATHER_S = 0.002
NAME = "local"


@dataclass(frozen=True, slots=True)
class _Request:
    request_id: str
    prompt: list[int]
    sampling: Sampling
    turn: "asyncio.Future[Turn]"


class LocalPolicy:
    """Turn source that decodes all waiting requests together; every turn is of version 0."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self._model = model
        self._waiting: list[_Request] = []
        self._decoding: asyncio.Task[None] | None = None

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        min_version: int | None = None,
    ) -> Turn:
        """Generate one turn greedily."""
        assert sampling.temperature == 0.0, "the policy is read greedily"
        turn: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(request_id, list(token_ids), sampling, turn))
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode_waiting())
        return await turn

    async def _decode_waiting(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            requests, self._waiting = self._waiting, []
            try:
                turns = await asyncio.to_thread(self._decode, requests)
            except Exception as error:
                for request in requests:
                    request.turn.set_exception(error)
                raise
            for request, turn in zip(requests, turns, strict=True):
                request.turn.set_result(turn)

    def _decode(self, requests: Sequence[_Request]) -> list[Turn]:
        sampling = requests[0].sampling
        assert all(request.sampling == sampling for request in requests), "one kind of sampling"
        replies: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        with torch.inference_mode():
            decoder = _Decoder(self._model, [request.prompt for request in requests])
            for step in range(sampling.max_tokens):
                logits = decoder.logits + reply_bias()
                if step < sampling.min_tokens:
                    logits[:, vocab.STOP_ID] = float("-inf")
                scores, tokens = torch.log_softmax(logits, dim=-1).max(-1)
                for row, (token, score) in enumerate(
                    zip(tokens.tolist(), scores.tolist(), strict=True)
                ):
                    if vocab.STOP_ID not in replies[row][-1:]:
                        replies[row].append(token)
                        logprobs[row].append(score)
                if all(reply[-1] == vocab.STOP_ID for reply in replies):
                    break
                decoder.feed(tokens[:, None])
        return [
            Turn(
                request_id=request.request_id,
                token_ids=tuple(reply),
                logprobs=tuple(scores),
                versions=((0, 0, len(reply)),),
                segments=((NAME, "dedicated", 0, len(reply)),),
                finish_reason="stop" if reply[-1] == vocab.STOP_ID else "length",
                attempts=1,
            )
            for request, reply, scores in zip(requests, replies, logprobs, strict=True)
        ]


class _Decoder:
    """Batch of left-padded prompts and their KV cache; `logits` [batch, vocabulary]."""

    def __init__(self, model: Qwen2ForCausalLM, prompts: Sequence[list[int]]) -> None:
        longest = max(len(prompt) for prompt in prompts)
        rows = [[vocab.PAD_ID] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._model = model
        self._mask = torch.tensor(mask)
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache = None
        self.logits = self._run(torch.tensor(rows))

    def feed(self, tokens: Tensor) -> None:
        """Append one token to each row, [batch, 1]."""
        self._mask = torch.cat((self._mask, torch.ones_like(tokens)), dim=1)
        self._positions = self._positions[:, -1:] + 1
        self.logits = self._run(tokens)

    def _run(self, tokens: Tensor) -> Tensor:
        result = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = result.past_key_values
        logits: Tensor = result.logits[:, -1]
        return logits


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Result of the warm start; `success`: greedy, on the validation lakes."""

    success: float
    steps: int

    @property
    def leaves_room(self) -> bool:
        """True if it is good enough to learn and bad enough to improve."""
        return LEAST_SUCCESS <= self.success <= MOST_SUCCESS


def warm_start(
    long_turns: bool, progress: Callable[[float], None]
) -> tuple[Qwen2ForCausalLM, WarmStart]:
    """Train the policy that every run starts from; less than a minute on one core."""
    rng = random.Random(SEED)  # noqa: S311 - an experiment, not a secret
    model = new_policy(SEED)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _cosine)
    weights = dict(model.named_parameters())
    lakes = different_lakes(VALIDATION_LAKES, "validation")
    how = sampling(long_turns=long_turns, greedy=True)

    def advance(step: int) -> None:
        shown = [
            demonstrate(random_lake(DEMONSTRATION_SEEDS + step * BATCH + i), rng, long_turns)
            for i in range(BATCH)
        ]
        chosen = [[at for at, mine in enumerate(one.learned) if mine] for one in shown]
        loss = -reply_logprobs(weights, [one.tokens for one in shown], chosen).mean()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        progress((step + 1) / STEPS)

    def success() -> float:
        crossed = asyncio.run(evaluate(LocalPolicy(model), how, lakes, 0, "warm start"))
        return sum(crossed) / len(crossed)

    reached = train_into_band(weights, advance, success)
    progress(1.0)
    return model, reached


def train_into_band(
    weights: Mapping[str, Tensor], advance: Callable[[int], None], success: Callable[[], float]
) -> WarmStart:
    """Call `advance` with each step's number until `success` is in the band; at most `STEPS` steps.

    `weights` are trained in place. Where success leaps over the band, they become a point on the
    line between the checkpoints before and after. What never reaches the band stays as it ended.
    """
    before: dict[str, Tensor] | None = None
    found = 0.0
    for step in range(STEPS):
        advance(step)
        if step + 1 < FIRST_CHECK or (step + 1) % CHECK_EVERY:
            continue
        found = success()
        if found > MOST_SUCCESS and before is not None:
            return WarmStart(_halve(weights, before, success, found), step + 1)
        if found >= LEAST_SUCCESS:
            return WarmStart(found, step + 1)
        before = {name: value.detach().clone() for name, value in weights.items()}
    return WarmStart(found, STEPS)


def _halve(
    weights: Mapping[str, Tensor],
    below: dict[str, Tensor],
    success: Callable[[], float],
    found: float,
) -> float:
    """Move `weights` towards `below` until success is in the band; returns the success reached."""
    above = {name: value.detach().clone() for name, value in weights.items()}
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        if LEAST_SUCCESS <= found <= MOST_SUCCESS:
            break
        share = (low + high) / 2
        with torch.no_grad():
            for name, value in weights.items():
                value.copy_(torch.lerp(below[name], above[name], share))
        found = success()
        low, high = (low, share) if found > MOST_SUCCESS else (share, high)
    return found


def _cosine(step: int) -> float:
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 * (1.0 + math.cos(math.pi * (step - WARM_UP_STEPS) / (STEPS - WARM_UP_STEPS)))
