"""The smallest Qwen2 that the engines of these tests serve: random, yet its layers matter."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from bench.common.tiny_models import FLEET_MODEL

VOCABULARY = FLEET_MODEL.vocabulary


def save_tiny_model(
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    seed: int = 0,
    eos_token_id: int | None = None,
) -> None:
    """Write a checkpoint. Turns are token ids, so the tokenizer only has to be found."""
    model = replace(FLEET_MODEL, dtype=dtype, eos_token_id=eos_token_id)
    model.save(folder, seed, words=False)
