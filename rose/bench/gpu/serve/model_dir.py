"""A model as a folder without weights: an engine makes them by itself (`--load-format dummy`)."""

import json
from pathlib import Path

from rose.bench.gpu.models import ModelShape

MAX_POSITIONS = 8192


def write_model(shape: ModelShape, folder: Path) -> None:
    """Configuration and a tokenizer that names every token, in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", _config(shape))
    # Prompts are token ids; engines still look up a name for each token that they stream.
    table = {f"<{index}>": index for index in range(shape.vocabulary)}
    _write(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": table, "unk_token": "<0>"},
        },
    )
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<0>"},
    )


def _config(shape: ModelShape) -> dict[str, object]:
    kind, name = ("qwen2", "Qwen2ForCausalLM") if shape.bias else ("llama", "LlamaForCausalLM")
    return {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
