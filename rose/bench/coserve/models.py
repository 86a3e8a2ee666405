"""`python -m rose.bench.coserve.models DIR`: random models for host (fp32) and guests (bf16).

Sizes: the host's step takes long enough that computing outweighs bookkeeping, and short enough that
a thousand requests an arm fit into the run. Torch is loaded in this process only.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VOCABULARY = 320
MAX_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A Qwen2 with heads of 64."""

    name: str
    hidden: int
    layers: int
    dtype: Literal["float32", "bfloat16"]


# fp32, so that a host request has the same tokens whatever batch it is in.
HOST = ModelSize("bench-host", hidden=384, layers=6, dtype="float32")
GUEST = ModelSize("bench-guest", hidden=256, layers=4, dtype="bfloat16")


def save_model(size: ModelSize, folder: Path, seed: int) -> None:
    """Write checkpoint and tokenizer in Hugging Face's layout."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(getattr(torch, size.dtype)).save_pretrained(folder)
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


def main() -> None:
    """Make both models in the folder that is named."""
    target = Path(sys.argv[1])
    for seed, size in enumerate((HOST, GUEST)):
        save_model(size, target / size.name, seed)


if __name__ == "__main__":
    main()
