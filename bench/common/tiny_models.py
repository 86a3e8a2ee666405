"""`python -m bench.common.tiny_models FOLDER JSON`: random Qwen2 models that engines serve.

The command makes `{name: {"model": fields of TinyModel, "seed"}}` in a process of its own, which
alone loads torch.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from weight_transfer import TensorBits


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A Qwen2 of few parameters.

    mlp: rows of the MLP. spread: deviation of the random weights; at Transformers' own, greedy
    decoding of a model this small hardly sees its layers. tied: whether embeddings are the head.
    """

    hidden: int
    layers: int
    heads: int
    mlp: int
    vocabulary: int
    kv_heads: int | None = None
    max_positions: int = 512
    dtype: Literal["float32", "bfloat16"] = "float32"
    spread: float = 0.02
    tied: bool = True
    eos_token_id: int | None = None

    def config(self) -> "Qwen2Config":
        from transformers import Qwen2Config

        return Qwen2Config(
            architectures=["Qwen2ForCausalLM"],
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            max_position_embeddings=self.max_positions,
            initializer_range=self.spread,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=self.eos_token_id,
        )

    def make(self, seed: int = 0) -> "Qwen2ForCausalLM":
        import torch
        from transformers import Qwen2ForCausalLM

        torch.manual_seed(seed)
        return Qwen2ForCausalLM(self.config()).to(getattr(torch, self.dtype))

    def save(self, folder: Path, seed: int = 0, *, words: bool = True) -> None:
        """Write checkpoint and tokenizer in Hugging Face's layout.

        Without `words` the tokenizer is only there to be found: prompts are token ids, and nobody
        asks for a token's name.
        """
        self.make(seed).save_pretrained(folder)
        if words:
            _save_tokenizer(folder, self.vocabulary)
        else:
            (folder / "tokenizer.json").write_text("{}")


# The smallest whose layers matter to what it generates; in fp32, so that a turn has the same tokens
# whatever batch it is in.
FLEET_MODEL = TinyModel(
    hidden=128, layers=3, heads=2, kv_heads=2, mlp=384, vocabulary=96, spread=0.15
)


def _save_tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    table = {f"<{index}>": index for index in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(table, unk_token="<0>"))  # noqa: S106 - a word, no secret
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<0>").save_pretrained(folder)  # noqa: S106


def write_safetensors(path: Path, tensors: Iterable["TensorBits"]) -> None:
    """Write a safetensors file of these tensors, which may be too many for torch's memory."""
    tensors = list(tensors)
    words = {"bfloat16": "BF16", "float32": "F32"}
    header, at = {}, 0
    for tensor in tensors:
        end = at + tensor.bits.nbytes
        offsets = {"data_offsets": [at, end]}
        header[tensor.name] = {"dtype": words[tensor.dtype], "shape": tensor.shape, **offsets}
        at = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors:
            file.write(tensor.bits.data)


def changed(base: Mapping[str, "TensorBits"], share: float, seed: int) -> dict[str, "TensorBits"]:
    """Return weights after a step that changes the lowest bit of about this share of them."""
    import numpy as np

    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in base.items():
        bits = tensor.bits.copy()
        moved = rng.integers(0, bits.size, max(1, int(share * bits.size)))
        bits[moved] = tensor.bits[moved] ^ 1
        new[name] = replace(tensor, bits=bits)
    return new


def main() -> None:
    folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    made: dict[str, dict[str, Any]] = wanted
    for name, asked in made.items():
        TinyModel(**asked["model"]).save(folder / name, asked["seed"])


if __name__ == "__main__":
    main()
