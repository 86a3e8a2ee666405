"""Shapes of the models that are measured; no weights are needed for them."""

from dataclasses import dataclass
from math import prod

from rose.errors import ConfigError

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
        """Checkpoint tensors by name."""
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
    # As Llama 3 8B.
    "8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128_256),
    # As Qwen2.5 7B.
    "7b": ModelShape(3584, 28, 28, 4, 128, 18944, 152_064, bias=True, rope_theta=1e6),
    # For tests and rehearsals.
    "tiny": ModelShape(64, 2, 4, 2, 16, 96, 320),
    "tiny-host": ModelShape(384, 6, 6, 2, 64, 1056, 320, bias=True, rope_theta=1e6),
    "tiny-guest": ModelShape(256, 4, 4, 2, 64, 704, 320),
}


def shape_of(model: str) -> ModelShape:
    """The shape of that name. Raises ConfigError."""
    if model not in SHAPES:
        raise ConfigError(f"no model {model!r}; choose one of {', '.join(SHAPES)}")
    return SHAPES[model]
