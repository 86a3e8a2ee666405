"""The policy network: a Qwen2 small enough to learn on one core, in a folder any engine serves."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rose.demo import vocab

MAX_POSITIONS = 1024
HOST_VOCABULARY = 320


def policy_config() -> Qwen2Config:
    """0.66 M parameters."""
    return Qwen2Config(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=vocab.VOCABULARY_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=vocab.PAD_ID,
    )


def host_config() -> Qwen2Config:
    """About 10 M parameters: a decode step of some five milliseconds on one core.

    Small, so that a run of minutes holds enough requests to judge their tail.
    """
    return Qwen2Config(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=1_056,
        vocab_size=HOST_VOCABULARY,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def new_policy(seed: int) -> Qwen2ForCausalLM:
    """A fresh policy in fp32."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(policy_config())


def load_policy(folder: Path) -> Qwen2ForCausalLM:
    """The policy of a folder in fp32: exactly the values that its bf16 bits stand for."""
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_model(
    model: Qwen2ForCausalLM, folder: Path, words: tuple[str, ...], end: str = ""
) -> None:
    """Write bf16 weights, config and tokenizer; `end` is the word that ends a text."""
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer(words, model.config.vocab_size, end or words[0]).save_pretrained(folder)


def _tokenizer(words: tuple[str, ...], size: int, end: str) -> PreTrainedTokenizerFast:
    table = {word: index for index, word in enumerate(words)}
    table |= {f"<{index}>": index for index in range(len(words), size)}
    tokenizer = Tokenizer(WordLevel(table, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # Named, or engines that take it for Qwen2's add words of that, outside the model's vocabulary.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=words[0], unk_token=words[0], eos_token=end
    )
