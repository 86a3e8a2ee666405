"""Sequences of different lengths through the network without paying for padding."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rose.demo import vocab

TOKENS_PER_PIECE = 4_096


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
