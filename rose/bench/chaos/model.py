"""The model of the chaos run: random and tiny, in fp32: a turn has the same tokens anywhere."""

from pathlib import Path

VOCABULARY = 96
MAX_POSITIONS = 512


def save_model(folder: Path, seed: int = 0) -> None:
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
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        # At Transformers' own scale greedy decoding would hardly see the layers.
        initializer_range=0.15,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
