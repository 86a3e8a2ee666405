"""A tiny Idefics3 of random weights, with the processor of its images.

An image is cut into four tiles of 28 x 28 and shown whole beside them: 34 tokens, of which 20 are
its embeddings, between others that name the tiles.
"""

import io
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IMAGE = 258
"""Token that stands for an image in a prompt, and for one of its embeddings."""
IMAGE_LENGTH = 34
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
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_vision_model(folder: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    """Write checkpoint, tokenizer (a byte a token) and processor."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    processor = _processor()
    processor.save_pretrained(folder)
    spread: dict[str, Any] = {"initializer_range": 0.15}
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **spread,
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        **spread,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).to(getattr(torch, dtype))
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
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: k for k, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([*SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = TEMPLATE
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    return Idefics3Processor(images, fast, image_seq_len=4, chat_template=TEMPLATE)
