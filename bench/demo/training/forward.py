"""Forward pass of the policy, and the logprob gap between engines and trainer.

The pass is a function of the weights, a dict by checkpoint name, so any version can be evaluated.
Sequences of different lengths go through without padding costs.

A policy's weights exist in three forms: as trained (fp32), as published (bf16 bits), as evaluated,
which is fp32 arithmetic on exactly the values that the published bits stand for.

Logprob gap: every delivered token is scored again under the version that its stamp names. A wrong
stamp, stale weights or a bad continuation all show here, token by token.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch.func import functional_call
from transformers import Qwen2Model

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.models import policy_config
from bench.demo.training.rollouts import TakenTurn, Trajectory
from weight_transfer import TensorBits
from weight_transfer.format.tensors import tensor_bits, tensor_of

TOKENS_PER_PIECE = 4_096
EMBEDDING = "model.embed_tokens.weight"


def values_of(bits: Mapping[str, TensorBits]) -> dict[str, Tensor]:
    """Return fp32 tensors with exactly the published values."""
    return {name: tensor_of(tensor).float() for name, tensor in bits.items()}


def published(master: Mapping[str, Tensor]) -> dict[str, TensorBits]:
    """Return the bits of the trained weights, rounded to bf16."""
    return {
        name: tensor_bits(name, weight.detach().to(torch.bfloat16), copy=False)
        for name, weight in master.items()
    }


def pieces(lengths: Sequence[int], budget: int = TOKENS_PER_PIECE) -> Iterator[list[int]]:
    """Indices grouped by similar length, each group at most `budget` tokens once padded."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and (len(group) + 1) * lengths[index] > budget:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def padded(sequences: Sequence[list[int]]) -> Tensor:
    """Right-padded int64 batch: under causal attention no real token sees the padding."""
    longest = max(len(sequence) for sequence in sequences)
    batch = torch.full((len(sequences), longest), vocab.PAD_ID, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        batch[row, : len(sequence)] = torch.tensor(sequence)
    return batch


Weights = Mapping[str, Tensor]


class _Layers(threading.local):
    """The policy's layers. A call puts its weights into them, so each thread has its own."""

    def __init__(self) -> None:
        self.model = Qwen2Model(policy_config())


_LAYERS = _Layers()


def reply_logprobs(
    weights: Weights,
    sequences: Sequence[list[int]],
    chosen: Sequence[Sequence[int]],
    min_tokens: int = 0,
) -> Tensor:
    """Log-probabilities (natural log) of chosen tokens, row by row, fp32 [sum of chosen].

    chosen[i]: positions (1 or more) in sequence i, rising. The distribution is that over
    `vocab.REPLY_IDS` at temperature 1, without the stop in the first `min_tokens` of a reply: the
    one an engine samples from and reports.
    """
    tokens = padded(sequences)
    rows = torch.repeat_interleave(
        torch.arange(len(chosen)), torch.tensor([len(positions) for positions in chosen])
    )
    columns = torch.tensor([at for positions in chosen for at in positions])
    own = {name.removeprefix("model."): value for name, value in weights.items()}
    given = {"input_ids": tokens, "use_cache": False}
    hidden = functional_call(_LAYERS.model, own, (), given).last_hidden_state[rows, columns - 1]
    logits = F.linear(hidden, weights[EMBEDDING]) + reply_bias()
    if min_tokens:
        early = _replied(tokens)[rows, columns] < min_tokens
        logits[:, vocab.STOP_ID].masked_fill_(early, float("-inf"))
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[rows, columns, None]).squeeze(1)


def _replied(tokens: Tensor) -> Tensor:
    """Return the tokens of its reply before each token [batch, length].

    The asking mark, which no reply may contain, begins a reply.
    """
    columns = torch.arange(tokens.shape[1]).expand_as(tokens)
    asked = columns.masked_fill(tokens != vocab.ASK_ID, -1).cummax(dim=1).values
    return columns - asked - 1


@lru_cache(maxsize=1)
def reply_bias() -> Tensor:
    """0 for tokens that a reply may contain, minus infinity for all others, [vocabulary]."""
    bias = torch.full((vocab.VOCABULARY_SIZE,), float("-inf"))
    bias[list(vocab.REPLY_IDS)] = 0.0
    return bias


Gap = dict[str, tuple[float, int]]
"""By kind of segment: sum of |engine's logprob - ours|, tokens."""


def rescored(
    trajectories: Sequence[Trajectory],
    snapshots: Mapping[int, Weights],
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
