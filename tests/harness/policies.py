"""A policy of two tensors, as its trainer and its checkpoint have it, and trainers' settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.integrations import TrainerSettings
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


def trainer_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a trainer's settings that have no default."""
    return {
        "ROSE_JOB": "grpo",
        "ROSE_SCHEDULER": "127.0.0.1:7400",
        "ROSE_GATEWAY": "http://127.0.0.1:8000",
        "ROSE_CHECKPOINT": str(folder),
        "ROSE_ROOT": str(folder / "root"),
        "ROSE_KEY": str(folder / "key"),
    }


def trainer_settings(folder: Path, **changes: Any) -> TrainerSettings:
    return TrainerSettings.from_env(trainer_environment(folder), **changes)
