"""Logprob gap: every delivered token scored again under the version that its stamp names.

A wrong stamp, stale weights or a bad continuation all show here, token by token.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rose.demo.forward import Weights, reply_logprobs
from rose.demo.sequences import pieces
from rose.demo.trajectory import TakenTurn, Trajectory

VERSIONS_KEPT = 4

Gap = dict[str, tuple[float, int]]
"""By kind of segment: sum of |engine's logprob - ours|, tokens."""


class Snapshots:
    """Evaluated weights of the last `VERSIONS_KEPT` versions."""

    def __init__(self) -> None:
        self._kept: dict[int, Weights] = {}

    def keep(self, version: int, weights: Weights) -> None:
        """Add a version; the oldest goes."""
        self._kept[version] = {name: value.detach() for name, value in weights.items()}
        for old in sorted(self._kept)[:-VERSIONS_KEPT]:
            del self._kept[old]

    def get(self, version: int) -> Weights | None:
        """The weights of a version, None when it is not kept."""
        return self._kept.get(version)


def rescored(
    trajectories: Sequence[Trajectory],
    snapshots: Snapshots,
    known: Mapping[tuple[str, int], Tensor],
    min_tokens: int = 0,
) -> dict[str, list[float | None]]:
    """By trajectory: our logprob of each sampled token under its stamped version.

    `known` holds scores that training computed already, by (trajectory, version). None for a
    token without stamp, or stamped with a version that is not kept.
    """
    stamps = {one.name: one.stamps() for one in trajectories}
    result: dict[str, list[float | None]] = {n: [None] * len(s) for n, s in stamps.items()}
    for version in sorted({v for of in stamps.values() for v in of if v is not None}):
        weights = snapshots.get(version)
        if weights is None:
            continue
        concerned = [one for one in trajectories if version in stamps[one.name]]
        scores = {o.name: known[o.name, version] for o in concerned if (o.name, version) in known}
        missing = [one for one in concerned if one.name not in scores]
        scores |= _scored(weights, missing, min_tokens)
        for name, values in scores.items():
            for at, (stamp, value) in enumerate(zip(stamps[name], values.tolist(), strict=True)):
                if stamp == version:
                    result[name][at] = value
    return result


def _scored(
    weights: Weights, trajectories: Sequence[Trajectory], min_tokens: int
) -> dict[str, Tensor]:
    scores: dict[str, Tensor] = {}
    with torch.no_grad():
        for piece in pieces([len(one.tokens) for one in trajectories]):
            part = [trajectories[index] for index in piece]
            positions = [one.positions() for one in part]
            values = reply_logprobs(weights, [one.tokens for one in part], positions, min_tokens)
            split = torch.split(values, [len(at) for at in positions])
            scores.update({one.name: of for one, of in zip(part, split, strict=True)})
    return scores


def turn_gap(taken: TakenTurn, ours: Sequence[float | None]) -> tuple[Gap, int]:
    """The gap of a turn by kind, and how many of its tokens could not be compared."""
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    unstamped = 0
    for kind, theirs, value in zip(taken.kinds(), taken.turn.logprobs, ours, strict=True):
        if value is None:
            unstamped += 1
            continue
        sums[kind] += abs(theirs - value)
        counts[kind] += 1
    return {kind: (sums[kind], counts[kind]) for kind in sums}, unstamped
