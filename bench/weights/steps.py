"""Training steps in bf16: synthetic ones like Adam's, and real ones of the demo's policy."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.format.tensors import TensorBits

WEIGHT_DEVIATION = 0.02
_SAMPLE = (256, 1024)


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor before and after a step."""

    old: TensorBits
    new: TensorBits

    @property
    def changed(self) -> int:
        return int((self.old.bits != self.new.bits).sum())

    @property
    def density(self) -> float:
        return self.changed / self.old.bits.size


def bf16(values: NDArray[np.float32]) -> NDArray[np.unsignedinteger[Any]]:
    """Return bits of float32 values, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def adam_step(rows: int, columns: int, rate: float, seed: int) -> Step:
    """Return a step of weights [rows, columns] of deviation 0.02, masters in float32.

    An update is the rate times a normal variable cut at 3: Adam's is its first moment over the root
    of its second.
    """
    rng = np.random.default_rng(seed)
    size = rows * columns
    master = rng.standard_normal(size, np.float32) * np.float32(WEIGHT_DEVIATION)
    update = np.clip(rng.standard_normal(size, np.float32), -3, 3) * np.float32(rate)
    shape = (rows, columns)
    return Step(
        TensorBits("w", "bfloat16", shape, bf16(master)),
        TensorBits("w", "bfloat16", shape, bf16(master - update)),
    )


def rate_for(density: float, seed: int = 0) -> float:
    """Return the rate at which such a step changes this share of weights, by bisection."""
    low, high = 1e-9, 1.0
    for _ in range(40):
        rate = (low * high) ** 0.5
        if adam_step(*_SAMPLE, rate, seed).density < density:
            low = rate
        else:
            high = rate
    return high


BATCH = 16
# The first updates of AdamW are as large as its rate; later ones are what training looks like.
SETTLE = 6
_MAPS = 2_000_000_000


def training_steps(policy: Path, rate: float, count: int, seed: int) -> Iterator[list[Step]]:
    """Yield steps of all tensors between consecutive checkpoints, supervised, with fp32 masters."""
    import torch

    from bench.demo.frozen_lake.data import demonstrate
    from bench.demo.frozen_lake.task import random_lake
    from bench.demo.training.forward import load_version_zero, published, reply_logprobs, values_of

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
