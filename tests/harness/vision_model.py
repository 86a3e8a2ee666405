"""Tiny vision-language models of random weights, with the processors of their images.

Idefics3 cuts an image into four tiles of 28 x 28 and shows it whole beside them: 34 tokens, of
which 20 are its embeddings, between others that name the tiles. Qwen2.5-VL enlarges it to 112 x 84:
12 tokens, all of them its embeddings.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IMAGE = 258
"""Token that stands for an image in a prompt, and for one of its embeddings."""
IMAGE_LENGTH, QWEN_IMAGE_LENGTH = 34, 12
# Beyond the tokenizer's, so that prompts of other tests fit.
VOCABULARY = 512
SPECIAL = (
    "<eos>",
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
QWEN_SPECIAL = ("<eos>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_SPREAD: dict[str, Any] = {"initializer_range": 0.15}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    **_SPREAD,
}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_vision_model(folder: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    """Write checkpoint, tokenizer (a byte a token) and processor."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    processor = _processor()
    processor.save_pretrained(folder)
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        **_SPREAD,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=LlamaConfig(**_TEXT),
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    _save_random(Idefics3ForConditionalGeneration, config, dtype, folder)


def save_qwen_vision_model(folder: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    """Write checkpoint, tokenizer (a byte a token) and image processor of a Qwen2.5-VL, which takes
    `torchvision` to be read as one processor.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _byte_tokenizer(QWEN_SPECIAL)
    tokenizer.save_pretrained(folder)
    pixels = 12 * 28 * 28
    size = {"shortest_edge": pixels, "longest_edge": 2 * pixels}
    Qwen2VLImageProcessorPil(size=size).save_pretrained(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["processor_class"] = "Qwen2_5_VLProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    rotary = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "out_hidden_size": 128,
        "intermediate_size": 128,
        "num_heads": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        **_SPREAD,
    }
    names = ("vision_start", "image", "vision_end", "video")
    tokens = {f"{name}_token_id": 257 + place for place, name in enumerate(names)}
    config = Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={**_TEXT, "rope_parameters": rotary},
        tie_word_embeddings=False,
        **tokens,
    )
    _save_random(Qwen2_5_VLForConditionalGeneration, config, dtype, folder)


def _save_random(kind: Any, config: Any, dtype: str, folder: Path) -> None:
    import torch

    torch.manual_seed(0)
    model = kind(config).to(getattr(torch, dtype))
    with torch.no_grad():
        # Norms of ones and biases of zeros would hide a weight in the place of another.
        for weight in model.parameters():
            weight.add_(0.03 * torch.randn(weight.shape).to(weight.dtype))
    model.save_pretrained(folder)


def picture(seed: int) -> bytes:
    """Return a file of PNG, 40 x 30 of random colours."""
    import numpy as np
    from PIL import Image

    made = io.BytesIO()
    colours = np.random.default_rng(seed).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(colours).save(made, "PNG")
    return made.getvalue()


def _processor() -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    tokenizer = _byte_tokenizer(SPECIAL)
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)


def _byte_tokenizer(special: Sequence[str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: k for k, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([*special])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast
