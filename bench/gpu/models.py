"""Models that are measured: shapes, folders that engines load, random weights in a file."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rose.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]
MAX_POSITIONS = 8192
THREADS = 8
_ONE = 0x3F80
# Bits of bf16: sign and mantissa are drawn whole, and two bits of an exponent from 2^-8 on.
_SIGN_AND_MANTISSA, _EXPONENT, _DRAWN_SHIFT, _SMALLEST = 0x807F, 7, 7, 119


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped attention and a gated MLP, in bf16.

    bias: of query, key and value, as Qwen2 has it. rope_theta: base of the rotary positions.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    bias: bool = False
    rope_theta: float = 500_000.0

    def tensors(self) -> Shapes:
        """Return the shapes of checkpoint tensors by name."""
        attention, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: Shapes = {
            "self_attn.q_proj.weight": (attention, self.hidden),
            "self_attn.k_proj.weight": (kv, self.hidden),
            "self_attn.v_proj.weight": (kv, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, attention),
            "mlp.gate_proj.weight": (self.mlp, self.hidden),
            "mlp.up_proj.weight": (self.mlp, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.mlp),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }
        if self.bias:
            layer |= {f"self_attn.{name}_proj.bias": (kv,) for name in "kv"}
            layer |= {"self_attn.q_proj.bias": (attention,)}
        found: Shapes = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        return found | {
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocabulary, self.hidden),
        }

    @property
    def weights(self) -> int:
        return sum(prod(shape) for shape in self.tensors().values())


SHAPES = {
    # Llama 3 8B
    "8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128_256),
    # Qwen2.5 7B
    "7b": ModelShape(3584, 28, 28, 4, 128, 18944, 152_064, bias=True, rope_theta=1e6),
    # Tests and rehearsals
    "tiny": ModelShape(64, 2, 4, 2, 16, 96, 320),
    "tiny-host": ModelShape(384, 6, 6, 2, 64, 1056, 320, bias=True, rope_theta=1e6),
    "tiny-guest": ModelShape(256, 4, 4, 2, 64, 704, 320),
}


def shape_of(model: str) -> ModelShape:
    """Return the shape of that name. Raises ConfigError."""
    if model not in SHAPES:
        raise ConfigError(f"no model {model!r}; choose one of {', '.join(SHAPES)}")
    return SHAPES[model]


def write_model(shape: ModelShape, folder: Path) -> None:
    """Write a configuration and a tokenizer that names every token, in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, name = ("qwen2", "Qwen2ForCausalLM") if shape.bias else ("llama", "LlamaForCausalLM")
    # Prompts are token ids; engines still look up a name for each token that they stream.
    table = {f"<{index}>": index for index in range(shape.vocabulary)}
    unused = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    files: dict[str, dict[str, object]] = {
        "config.json": {
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
        },
        "tokenizer.json": dict.fromkeys(unused)
        | {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": table, "unk_token": "<0>"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<0>",
        },
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")


def write_weights(shape: ModelShape, folder: Path, seed: int) -> Path:
    """Write a safetensors file of `seed`'s weights, unless it is there.

    Weights have two signs, four exponents and all mantissas; norms are one.
    """
    import numpy as np

    from bench.common.tiny_models import write_safetensors
    from weight_transfer import TensorBits

    path = folder / f"{seed}-model.safetensors"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)

    def drawn(numbered: tuple[int, tuple[str, tuple[int, ...]]]) -> TensorBits:
        number, (name, dimensions) = numbered
        rng = np.random.default_rng((seed, number))
        bits = rng.integers(0, 1 << 16, prod(dimensions), np.uint16)
        exponent = ((((bits >> _DRAWN_SHIFT) & 3) + _SMALLEST) << _EXPONENT).astype(np.uint16)
        bits = (
            np.full_like(bits, _ONE)
            if "norm" in name
            else bits & np.uint16(_SIGN_AND_MANTISSA) | exponent
        )
        return TensorBits(name, "bfloat16", dimensions, bits)

    with ThreadPoolExecutor(THREADS) as pool:
        tensors = list(pool.map(drawn, enumerate(shape.tensors().items())))
    part = path.with_suffix(".part")
    write_safetensors(part, tensors)
    part.rename(path)
    return path
