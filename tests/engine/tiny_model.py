"""The smallest Qwen2 that the engines of these tests serve: random, yet its layers matter."""

from pathlib import Path
from typing import Literal

VOCABULARY = 96


def save_tiny_model(
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    seed: int = 0,
    eos_token_id: int | None = None,
) -> None:
    """Write a checkpoint. Turns are token ids, so the tokenizer only has to be found."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        # Transformers initialises so small that greedy decoding would hardly see the layers.
        initializer_range=0.15,
    )
    Qwen2ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
