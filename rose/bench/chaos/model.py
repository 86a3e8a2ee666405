"""The model of the chaos run: random and tiny, in fp32: a turn has the same tokens anywhere."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

VOCABULARY = 96
MAX_POSITIONS = 512


def make_model(seed: int = 0, eos_token_id: int | None = None) -> "Qwen2ForCausalLM":
    """The smallest Qwen2 whose layers matter to what it generates."""
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
        eos_token_id=eos_token_id,
        # At Transformers' own scale greedy decoding would hardly see the layers.
        initializer_range=0.15,
    )
    return Qwen2ForCausalLM(config)


def save_model(folder: Path, seed: int = 0) -> None:
    """Write a checkpoint, and a tokenizer that names tokens: turns are token ids."""
    make_model(seed).save_pretrained(folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    table = {f"<{index}>": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(table, unk_token="<0>"))  # noqa: S106 - a word, no secret
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<0>").save_pretrained(folder)  # noqa: S106
