"""Weights of a policy of two tensors, as a trainer holds them and as its checkpoint has them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weight_transfer import TensorBits, tensor_bits

if TYPE_CHECKING:
    import torch

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


def weights(seed: int = 0) -> "dict[str, torch.Tensor]":
    """Return a trainer's weights: fp32 masters."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    return {
        EMBED: torch.randn(6, 4, generator=drawn),
        NORM: torch.randn(4, generator=drawn),
    }


def checkpoint(tensors: "Mapping[str, torch.Tensor]") -> dict[str, TensorBits]:
    """The same as replicas start with it: bf16."""
    return {name: tensor_bits(name, tensor.bfloat16()) for name, tensor in tensors.items()}
