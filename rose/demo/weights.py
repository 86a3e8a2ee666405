"""A policy's weights, three ways: as trained (fp32), as published (bf16 bits), as evaluated.

Evaluated means fp32 arithmetic on exactly the values that the published bits stand for.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from weight_transfer import TensorBits
from weight_transfer.checkpoint import read_model_dir
from weight_transfer.tensors import tensor_bits, tensor_of


def load_version_zero(folder: Path) -> dict[str, TensorBits]:
    """The bits of a model folder."""
    return read_model_dir(folder)


def values_of(bits: Mapping[str, TensorBits]) -> dict[str, Tensor]:
    """fp32 tensors with exactly the published values."""
    return {name: tensor_of(tensor).float() for name, tensor in bits.items()}


def published(master: Mapping[str, Tensor]) -> dict[str, TensorBits]:
    """Bits of the trained weights, rounded to bf16."""
    return {
        name: tensor_bits(name, weight.detach().to(torch.bfloat16), copy=False)
        for name, weight in master.items()
    }
