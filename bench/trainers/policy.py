"""A policy small enough to be trained on a CPU within a minute: two layers, one token a byte.

`python -m bench.trainers.policy FOLDER [TEMPLATE]`: TEMPLATE is the file of a chat template,
for trainers that only work with one that they know.
"""

import sys
from pathlib import Path

from bench.common.tiny_models import TinyModel

END, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
# Words of Qwen's templates: one token each, as trainers expect.
WORDS = ("tool_call", "think", "tool_response")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 320


def save_policy(folder: Path, template: str = CHATML, seed: int = 0) -> Path:
    """Write checkpoint and tokenizer in Hugging Face's layout."""
    end, pad = _save_tokenizer(folder, template)
    model = TinyModel(
        hidden=128,
        layers=2,
        heads=2,
        mlp=384,
        vocabulary=VOCABULARY,
        max_positions=2_048,
        dtype="bfloat16",
        eos_token_id=end,
    ).make(seed)
    model.config.pad_token_id = pad
    model.generation_config.pad_token_id = pad
    model.save_pretrained(folder)
    return folder


def _save_tokenizer(folder: Path, template: str) -> tuple[int, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, additional_special_tokens=[START]
    )
    fast.add_tokens([f"<{slash}{word}>" for word in WORDS for slash in ("", "/")])
    fast.chat_template = template
    fast.save_pretrained(folder)
    return int(fast.eos_token_id), int(fast.pad_token_id)


if __name__ == "__main__":
    given = Path(sys.argv[2]).read_text(encoding="utf-8") if len(sys.argv) > 2 else CHATML
    save_policy(Path(sys.argv[1]), given)
