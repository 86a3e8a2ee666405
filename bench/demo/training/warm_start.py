"""Supervised warm start: a policy that knows the format and part of the way.

How much a policy learns in so many steps depends on the arithmetic of the machine that trains it.
So the warm start does not end after a number of steps, but when it crosses about two in five of
the validation lakes: wherever it is made, it leaves room for what reinforcement learning adds.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.data import demonstrate
from bench.demo.frozen_lake.models import new_policy
from bench.demo.frozen_lake.task import Episode, different_lakes, random_lake
from bench.demo.training.forward import reply_logprobs
from bench.demo.training.rollouts import sampling
from rose.client import Sampling

STEPS = 250
BATCH = 32
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 20
SEED = 1_234
# Seeds of maps: training episodes, demonstrations and held-out maps never meet.
DEMONSTRATION_SEEDS = 1_000_000_000
VALIDATION_LAKES = 256
# Greedy success on the validation lakes at which the warm start ends.
LEAST_SUCCESS, MOST_SUCCESS = 0.34, 0.46
# Nothing is crossed before.
FIRST_CHECK, CHECK_EVERY = 90, 10
# Between one check and the next success may leap over the band: the way is then halved so often.
HALVINGS = 4
# Words that no reply may contain.
OTHERS = sorted({*range(vocab.VOCABULARY_SIZE)} - {*vocab.REPLY_IDS})


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
        episodes = [Episode(lake) for lake in lakes]
        while playing := [one for one in episodes if not one.done]:
            replies = greedy_replies(model, [one.tokens for one in playing], how)
            for episode, reply in zip(playing, replies, strict=True):
                episode.reply(reply)
        return fmean(one.reward > 0 for one in episodes)

    reached = train_into_band(weights, advance, success)
    progress(1.0)
    return model, reached


def greedy_replies(
    model: Qwen2ForCausalLM, prompts: Sequence[list[int]], how: Sampling
) -> list[list[int]]:
    """Return the policy's likeliest reply to each prompt, decoded together."""
    longest = max(map(len, prompts))
    rows = torch.tensor([[vocab.PAD_ID] * (longest - len(each)) + each for each in prompts])
    made = model.generate(
        rows,
        attention_mask=(rows != vocab.PAD_ID).long(),
        do_sample=False,
        max_new_tokens=how.max_tokens,
        min_new_tokens=how.min_tokens,
        eos_token_id=vocab.STOP_ID,
        pad_token_id=vocab.PAD_ID,
        suppress_tokens=OTHERS,
    )
    replies = made[:, longest:].tolist()
    return [
        reply[: reply.index(vocab.STOP_ID) + 1] if vocab.STOP_ID in reply else reply
        for reply in replies
    ]


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
