"""Group-relative policy optimisation: advantages within a group, and the clipped objective.

Shao et al., "DeepSeekMath" (2024); asymmetric clipping and the token mean of Yu et al., "DAPO"
(2025).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


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
