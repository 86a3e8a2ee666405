"""The policy's forward pass as a plain function of its weights.

The same numbers as transformers' Qwen2 in fp32, at a fraction of its overhead: training shares a
core with engines. Weights are a dict by checkpoint name, so any version can be evaluated.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from rose.demo import vocab
from rose.demo.model import policy_config
from rose.demo.sequences import padded

Weights = Mapping[str, Tensor]

_CONFIG = policy_config()
LAYERS: int = _CONFIG.num_hidden_layers
HEADS: int = _CONFIG.num_attention_heads
HIDDEN: int = _CONFIG.hidden_size
HEAD = HIDDEN // HEADS
EPSILON: float = _CONFIG.rms_norm_eps
ROPE_BASE = 10_000.0
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"


@lru_cache(maxsize=8)
def _rotation(length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, HEAD] of rotary position embedding."""
    inverse = 1.0 / ROPE_BASE ** (torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotated(states: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, length, HEAD]."""
    length = states.shape[2]
    # Tables of round lengths, so that few are made.
    cosine, sine = _rotation(-(-length // 64) * 64)
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return states * cosine[:length] + turned * sine[:length]


def _normed(states: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(states, (HIDDEN,), weight, EPSILON)


def _attention(weights: Weights, layer: str, states: Tensor) -> Tensor:
    """Causal self-attention before its output projection, [batch, length, HIDDEN]."""
    batch, length, _ = states.shape
    parts = []
    for name in ("q_proj", "k_proj", "v_proj"):
        prefix = f"{layer}.self_attn.{name}"
        part = F.linear(states, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])
        parts.append(part.view(batch, length, HEADS, HEAD).transpose(1, 2))
    mixed = F.scaled_dot_product_attention(
        _rotated(parts[0]), _rotated(parts[1]), parts[2], is_causal=True
    )
    return mixed.transpose(1, 2).reshape(batch, length, HIDDEN)


def _mlp(weights: Weights, layer: str, states: Tensor) -> Tensor:
    gate = F.silu(F.linear(states, weights[f"{layer}.mlp.gate_proj.weight"]))
    up = F.linear(states, weights[f"{layer}.mlp.up_proj.weight"])
    return F.linear(gate * up, weights[f"{layer}.mlp.down_proj.weight"])


def hidden_states(weights: Weights, tokens: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    """Final hidden states [n, HIDDEN] at the n positions (rows, columns) `at` of int64 `tokens`.

    tokens: [batch, length], right-padded. The last layer works at these positions only.
    """
    states = F.embedding(tokens, weights[EMBEDDING])
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        normed = _normed(states, weights[f"{layer}.input_layernorm.weight"])
        mixed = _attention(weights, layer, normed)
        if index == LAYERS - 1:
            states, mixed = states[at], mixed[at]
        states = states + F.linear(mixed, weights[f"{layer}.self_attn.o_proj.weight"])
        normed = _normed(states, weights[f"{layer}.post_attention_layernorm.weight"])
        states = states + _mlp(weights, layer, normed)
    return _normed(states, weights[FINAL_NORM])


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
    hidden = hidden_states(weights, tokens, (rows, columns - 1))
    logits = F.linear(hidden, weights[EMBEDDING]) + reply_bias()
    if min_tokens:
        early = _replied(tokens)[rows, columns] < min_tokens
        logits[:, vocab.STOP_ID].masked_fill_(early, float("-inf"))
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[rows, columns, None]).squeeze(1)


def _replied(tokens: Tensor) -> Tensor:
    """How many tokens of its own reply stand before each token [batch, length]; the asking mark,
    which no reply may contain, begins a reply."""
    columns = torch.arange(tokens.shape[1]).expand_as(tokens)
    asked = columns.masked_fill(tokens != vocab.ASK_ID, -1).cummax(dim=1).values
    return columns - asked - 1


@lru_cache(maxsize=1)
def reply_bias() -> Tensor:
    """0 for tokens that a reply may contain, minus infinity for all others, [vocabulary]."""
    bias = torch.full((vocab.VOCABULARY_SIZE,), float("-inf"))
    bias[list(vocab.REPLY_IDS)] = 0.0
    return bias
