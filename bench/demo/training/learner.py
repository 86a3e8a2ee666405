"""Learner: group-relative policy optimisation, one clipped update for each batch of trajectories.

Advantages are taken within a group (Shao et al., "DeepSeekMath", 2024). Asymmetric clipping and the
token mean are those of Yu et al., "DAPO" (2025).

The forward pass runs on the published (bf16-rounded) values and the gradient moves the fp32 master
copy: the policy that is trained is exactly the one that engines sample from.
"""

import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor

from bench.demo.cli import TrainerControl
from bench.demo.training.forward import pieces, published, reply_logprobs, values_of
from bench.demo.training.rollouts import Trajectory
from weight_transfer import TensorBits

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LEARNING_RATE = 2e-4
# A long turn is mostly recital: its tokens outnumber those that decide.
LONG_LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
# Adam's first steps move every weight by the full rate, whatever the gradient: begin gently.
WARM_UP_STEPS = 5
# The rate ends here: a policy that still jumps about is worse when it is read greedily.
FINAL_SHARE = 0.1
MAX_GRADIENT_NORM = 1.0


def advantages(groups: Sequence[int], rewards: Sequence[float]) -> list[float]:
    """(reward - group's mean) / group's deviation; 0 throughout a group of equal rewards."""
    members: dict[int, list[float]] = defaultdict(list)
    for group, reward in zip(groups, rewards, strict=True):
        members[group].append(reward)
    centre = {group: fmean(values) for group, values in members.items()}
    spread = {group: pstdev(values) for group, values in members.items()}
    return [
        (reward - centre[group]) / spread[group] if spread[group] > 0 else 0.0
        for group, reward in zip(groups, rewards, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Objective:
    """`loss`: a scalar, summed over tokens; `clipped`: tokens whose gradient the clip removed."""

    loss: Tensor
    clipped: int


def clipped_objective(new: Tensor, behaviour: Tensor, advantage: Tensor) -> Objective:
    """The objective of tokens, all [tokens]: logprobs now, logprobs at sampling, advantages."""
    ratio = torch.exp(new - behaviour)
    bounded = ratio.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH)
    gain, bounded_gain = ratio * advantage, bounded * advantage
    clipped = int((bounded_gain.detach() < gain.detach()).sum())
    return Objective(-torch.minimum(gain, bounded_gain).sum(), clipped)


@dataclass(frozen=True, slots=True)
class Update:
    """One step. `logprobs` [sampled tokens of the trajectory], under the version before it, of
    the trajectories that were trained on."""

    old: dict[str, TensorBits]
    new: dict[str, TensorBits]
    clip_fraction: float
    gradient_norm: float
    train_s: float
    logprobs: dict[str, Tensor]


class Learner:
    """Master weights, optimiser and the version that they were last published as."""

    def __init__(
        self,
        base: Mapping[str, TensorBits],
        control: TrainerControl | None = None,
        seed: int = 0,
        learning_rate: float = LEARNING_RATE,
        min_tokens: int = 0,
        decay_steps: int | None = None,
    ) -> None:
        """`decay_steps`: the rate falls linearly until then; None: it stays."""
        self.bits = dict(base)
        self.values = values_of(base)
        self._master = {name: value.clone() for name, value in self.values.items()}
        rate = 0.0 if control == "lr0" else learning_rate
        self._optimiser = torch.optim.AdamW(
            list(self._master.values()), lr=rate, betas=BETAS, weight_decay=0.0, fused=True
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimiser, lambda step: _share_of_rate(step, decay_steps)
        )
        self._shuffled = control == "shuffled-advantage"
        self._min_tokens = min_tokens
        self._rng = random.Random(seed)  # noqa: S311 - an experiment, not a secret

    def step(self, batch: Sequence[Trajectory]) -> Update:
        """Train on a batch; `values` and `bits` are the new version's afterwards."""
        started_s = time.perf_counter()
        old = self.bits
        trained, wanted = self._advantages(batch)
        leaves = {name: value.requires_grad_(True) for name, value in self.values.items()}
        tokens = sum(len(one.positions()) for one in trained)
        clipped, logprobs = 0, {}
        for piece in pieces([len(one.tokens) for one in trained]):
            part = [trained[index] for index in piece]
            positions = [one.positions() for one in part]
            sequences = [one.tokens for one in part]
            new = reply_logprobs(leaves, sequences, positions, self._min_tokens)
            behaviour = torch.tensor([value for one in part for value in one.logprobs()])
            counts = [len(at) for at in positions]
            advantage = torch.tensor([wanted[index] for index in piece]).repeat_interleave(
                torch.tensor(counts)
            )
            objective = clipped_objective(new, behaviour, advantage)
            torch.autograd.backward(objective.loss / tokens)
            clipped += objective.clipped
            scored = torch.split(new.detach(), counts)
            logprobs.update({one.name: of for one, of in zip(part, scored, strict=True)})
        norm = self._apply(leaves) if trained else 0.0
        return Update(
            old=old,
            new=self.bits,
            clip_fraction=clipped / tokens if tokens else 0.0,
            gradient_norm=norm,
            train_s=time.perf_counter() - started_s,
            logprobs=logprobs,
        )

    def _advantages(self, batch: Sequence[Trajectory]) -> tuple[list[Trajectory], list[float]]:
        """Trajectories worth training on, and their advantages."""
        found = advantages([one.group for one in batch], [one.reward for one in batch])
        pairs = [
            (one, value) for one, value in zip(batch, found, strict=True) if value and one.turns
        ]
        values = [value for _, value in pairs]
        if self._shuffled:
            self._rng.shuffle(values)
        return [one for one, _ in pairs], values

    def _apply(self, leaves: Mapping[str, Tensor]) -> float:
        """Move the master weights by the leaves' gradients; returns the gradient's norm."""
        for name, leaf in leaves.items():
            self._master[name].grad = leaf.grad
        norm = torch.nn.utils.clip_grad_norm_(self._master.values(), MAX_GRADIENT_NORM)
        self._optimiser.step()
        self._schedule.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.bits = published(self._master)
        self.values = values_of(self.bits)
        return float(norm)


def _share_of_rate(step: int, decay_steps: int | None) -> float:
    """Return the fraction of the learning rate that update number `step` uses."""
    decayed = 1.0 - step / decay_steps if decay_steps else 1.0
    return min((step + 1) / WARM_UP_STEPS, max(FINAL_SHARE, decayed))
