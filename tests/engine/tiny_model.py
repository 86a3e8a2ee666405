"""The smallest Qwen2 that the engines of these tests serve: random, yet its layers matter."""

from pathlib import Path
from typing import Literal

from rose.bench.chaos.model import VOCABULARY, make_model

__all__ = ["VOCABULARY", "save_tiny_model"]


def save_tiny_model(
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    seed: int = 0,
    eos_token_id: int | None = None,
) -> None:
    """Write a checkpoint. Turns are token ids, so the tokenizer only has to be found."""
    import torch

    make_model(seed, eos_token_id).to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
