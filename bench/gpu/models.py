"""Models that are measured: shapes, folders that engines load, random weights in a file."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rose.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Shapes = dict[str, tuple[int, ...]]


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
        layer = {
            "self_attn.q_proj": (attention, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, attention),
            "mlp.gate_proj": (self.mlp, self.hidden),
            "mlp.up_proj": (self.mlp, self.hidden),
            "mlp.down_proj": (self.hidden, self.mlp),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        if self.bias:
            layer |= {f"self_attn.{name}_proj.bias": (kv,) for name in "kv"}
            layer |= {"self_attn.q_proj.bias": (attention,)}
        found: Shapes = {"model.embed_tokens": (self.vocabulary, self.hidden)}
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        return found | {
            "model.norm": (self.hidden,),
            "lm_head": (self.vocabulary, self.hidden),
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


MAX_POSITIONS = 8192


def write_model(shape: ModelShape, folder: Path) -> None:
    """Write a configuration and a tokenizer that names every token, in Hugging Face's layout."""
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


FILE = "model.safetensors"
THREADS = 8
_ONE = 0x3F80
# Bits of bf16: sign and mantissa are drawn whole, and two bits of an exponent from 2^-8 on.
_SIGN_AND_MANTISSA, _EXPONENT, _DRAWN_SHIFT, _SMALLEST = 0x807F, 7, 7, 119


def write_weights(shape: ModelShape, folder: Path, seed: int) -> Path:
    """Write a safetensors file of `seed`'s weights; a complete file is kept."""
    path = folder / f"{seed}-{FILE}"
    header, offsets = _header(shape)
    size = len(header) + 2 * shape.weights
    if path.is_file() and path.stat().st_size == size:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file, ThreadPoolExecutor(THREADS) as pool:
        os.pwrite(file.fileno(), header, 0)

        def fill(numbered: tuple[int, tuple[str, int]]) -> None:
            number, (name, offset) = numbered
            bits = _weights(name, prod(shape.tensors()[name]), seed, number)
            written = memoryview(bits.tobytes())
            at = len(header) + offset
            while written:
                done = os.pwrite(file.fileno(), written, at)
                written, at = written[done:], at + done

        list(pool.map(fill, enumerate(offsets.items())))
    part.rename(path)
    return path


def checkpoint_name(name: str) -> str:
    """Return a tensor's name in a checkpoint."""
    return name if name.endswith(".bias") else f"{name}.weight"


def _header(shape: ModelShape) -> tuple[bytes, dict[str, int]]:
    """Return the file's header, and the offset of each tensor behind it."""
    offsets: dict[str, int] = {}
    entries: dict[str, object] = {}
    end = 0
    for name, dimensions in shape.tensors().items():
        offsets[name], end = end, end + 2 * prod(dimensions)
        entries[checkpoint_name(name)] = {
            "dtype": "BF16",
            "shape": list(dimensions),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _weights(name: str, count: int, seed: int, number: int) -> "NDArray[np.uint16]":
    """Return weights over two signs, four exponents and all mantissas; norms are one."""
    import numpy as np

    if "norm" in name:
        return np.full(count, _ONE, np.uint16)
    drawn = np.random.default_rng((seed, number)).integers(0, 1 << 16, count, np.uint16)
    bits = drawn & np.uint16(_SIGN_AND_MANTISSA)
    bits |= ((((drawn >> _DRAWN_SHIFT) & 3) + _SMALLEST) << _EXPONENT).astype(np.uint16)
    return bits
