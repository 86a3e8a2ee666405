"""Supervised warm start: a policy that knows the format and half of the way."""

import math
import random
from collections.abc import Callable

import torch
from transformers import Qwen2ForCausalLM

from rose.demo.demonstrations import demonstrate
from rose.demo.forward import reply_logprobs
from rose.demo.model import new_policy
from rose.demo.task import random_lake

STEPS = 250
BATCH = 32
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 20
SEED = 1_234
# Seeds of maps: training episodes, demonstrations and held-out maps never meet.
DEMONSTRATION_SEEDS = 1_000_000_000


def warm_start(long_turns: bool, progress: Callable[[float], None]) -> Qwen2ForCausalLM:
    """Train the policy that every run starts from; less than a minute on one core."""
    rng = random.Random(SEED)  # noqa: S311 - an experiment, not a secret
    model = new_policy(SEED)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _cosine)
    weights = dict(model.named_parameters())
    for step in range(STEPS):
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
    return model


def _cosine(step: int) -> float:
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 * (1.0 + math.cos(math.pi * (step - WARM_UP_STEPS) / (STEPS - WARM_UP_STEPS)))
