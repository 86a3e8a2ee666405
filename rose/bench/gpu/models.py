"""Shapes of the models that an update is measured on; no weights are needed for them."""

from dataclasses import dataclass
from math import prod

from rose.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped attention and a gated MLP, in bf16."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int

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
        found: Shapes = {"model.embed_tokens": (self.vocabulary, self.hidden)}
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        return found | {
            "model.norm": (self.hidden,),
            "lm_head": (self.vocabulary, self.hidden),
        }

    @property
    def weights(self) -> int:
        """How many."""
        return sum(prod(shape) for shape in self.tensors().values())


SHAPES = {
    # As Llama 3 8B.
    "8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128_256),
    # For tests.
    "tiny": ModelShape(64, 2, 4, 2, 16, 96, 320),
}


def shape_of(model: str) -> ModelShape:
    """The shape of that name. Raises ConfigError."""
    if model not in SHAPES:
        raise ConfigError(f"no model {model!r}; choose one of {', '.join(SHAPES)}")
    return SHAPES[model]
