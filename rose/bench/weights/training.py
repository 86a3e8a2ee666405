"""Real training steps: the demo's policy, trained on and rounded to bf16 after each update."""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rose.bench.weights.synthetic import Step
from rose.demo.frozen_lake.data import demonstrate
from rose.demo.frozen_lake.task import random_lake
from rose.demo.training.forward import load_version_zero, published, reply_logprobs, values_of
from weight_transfer.format.tensors import TensorBits

BATCH = 16
# The first updates of AdamW are as large as its rate; later ones are what training looks like.
SETTLE = 6
_MAPS = 2_000_000_000


def training_steps(policy: Path, rate: float, count: int, seed: int) -> Iterator[list[Step]]:
    """Steps of all tensors between consecutive checkpoints, supervised, with fp32 masters."""
    rng = random.Random(seed)  # noqa: S311 - an experiment, not a secret
    old: Mapping[str, TensorBits] = load_version_zero(policy)
    masters = {name: value.requires_grad_(True) for name, value in values_of(old).items()}
    optimiser = torch.optim.AdamW(list(masters.values()), lr=rate, weight_decay=0.0)
    for number in range(SETTLE + count):
        shown = [
            demonstrate(random_lake(_MAPS + number * BATCH + i), rng, long_turns=False)
            for i in range(BATCH)
        ]
        chosen = [[at for at, mine in enumerate(one.learned) if mine] for one in shown]
        loss = -reply_logprobs(masters, [one.tokens for one in shown], chosen).mean()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        new = _copied(published(masters))
        if number >= SETTLE:
            yield [Step(old[name], new[name]) for name in sorted(new)]
        old = new


def _copied(tensors: Mapping[str, TensorBits]) -> dict[str, TensorBits]:
    return {n: TensorBits(n, t.dtype, t.shape, t.bits.copy()) for n, t in tensors.items()}
