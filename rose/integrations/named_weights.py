"""Named tensors of a trainer as the bits of its checkpoint: dtypes, tied names, wrappers' prefixes.

What replicas started with decides: each of its tensors is published, in its dtype. A trainer's own
name for it may carry what wrappers put in front. Names are one tensor's (tied) only where the
model's config says so, never since their values are equal: norms of ones are equal too.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rose.errors import RefusedError
from weight_transfer import TensorBits, TensorFormatError, tensor_bits

if TYPE_CHECKING:
    import torch

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
SHOWN = 4
# By the last part of their modules' names: one tensor in a model with `tie_word_embeddings`.
_INPUT = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
# Types that master weights are cast to; an 8-bit float needs scales, which only a trainer knows.
_CAST = ("float64", "float32", "bfloat16", "float16")
_OUTPUT = ("lm_head", "embed_out", "output")
Named = Iterable[tuple[str, "torch.Tensor"]]


class UnfitWeightsError(RefusedError):
    """Trainer's tensors that do not fit the checkpoint that replicas started with."""


def checkpoint_name(name: str) -> str:
    """The name without what `torch.compile`, FSDP and activation checkpointing put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def ties_embeddings(model_dir: Path) -> bool | None:
    """Return `tie_word_embeddings` of a model's config.json, None where it does not say.

    The text model's own word counts first, as for models of several parts.
    """
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    own = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    tied = config.get("tie_word_embeddings") if own is None else own
    return tied if isinstance(tied, bool) else None


def _is_embedding(name: str) -> bool:
    """Return True for the name of a model's input or output embedding."""
    parts = name.split(".")
    return parts[-1] == "weight" and len(parts) > 1 and parts[-2] in (*_INPUT, *_OUTPUT)


class NamedWeights:
    """Collects one version; `base` says names, dtypes and shapes.

    tied: the model's config ties its input and output embeddings. None: it does not say, and they
    are where the checkpoint has but one of them.

    Every tensor of the iterable is visited, whatever is wrong with one before it: gathering a
    DTensor is collective, and a rank that stopped would be waited for.
    """

    def __init__(self, base: Mapping[str, TensorBits], *, tied: bool | None = None) -> None:
        self._base = base
        self._tied = tied
        self._bits: dict[str, TensorBits] = {}
        self._others: dict[str, TensorBits] = {}
        self._troubles: list[str] = []

    def take(self, named: Named, *, keep: bool = True) -> None:
        """Read them all, gathered from their ranks; keep: this rank publishes."""
        for name, tensor in named:
            whole = _gathered(tensor)
            if keep:
                self._take(checkpoint_name(name), whole)

    def finish(self) -> dict[str, TensorBits]:
        """All tensors of the checkpoint. Raises `UnfitWeightsError` for what does not fit."""
        if self._tied:
            for name in filter(_is_embedding, self._base.keys() - self._bits.keys()):
                bits = self._twin(self._base[name], self._bits)
                if bits is not None:
                    self._bits[name] = TensorBits(name, bits.dtype, bits.shape, bits.bits)
        strange = [name for name, each in self._others.items() if not self._is_copy(each)]
        if strange:
            self._trouble("the checkpoint has no", strange)
        if missing := self._base.keys() - self._bits.keys():
            self._trouble("the trainer does not give", missing)
        if self._troubles:
            raise UnfitWeightsError("; ".join(self._troubles))
        return self._bits

    def _take(self, name: str, tensor: "torch.Tensor") -> None:
        import torch

        want = self._base.get(name)
        if want is None:
            if "lora_" in name:
                self._troubles[:] = ["adapters are not published; merge them into the weights"]
            try:
                self._others[name] = tensor_bits(name, tensor)
            except TensorFormatError as error:
                self._troubles.append(f"the checkpoint has no {name}, and its {error}")
            return
        if tuple(tensor.shape) != want.shape:
            self._troubles.append(f"{name} is {tuple(tensor.shape)}, not {want.shape}")
            return
        dtype = getattr(torch, want.dtype)
        castable = want.dtype in _CAST and str(tensor.dtype).removeprefix("torch.") in _CAST
        if tensor.dtype != dtype and not castable:
            self._troubles.append(f"{name} is {tensor.dtype}, which is not cast to {want.dtype}")
            return
        bits = tensor_bits(name, tensor.detach().to("cpu", dtype))
        before = self._bits.get(name)
        if before is not None and not np.array_equal(before.bits, bits.bits):
            self._troubles.append(f"the trainer gives {name} twice, with other values")
            return
        self._bits[name] = bits

    def _twin(self, tensor: TensorBits, among: Mapping[str, TensorBits]) -> TensorBits | None:
        """Return the tensor that the config ties to another one, None without."""
        for name, other in among.items():
            alike = other.shape == tensor.shape and other.dtype == tensor.dtype
            if name != tensor.name and alike and _is_embedding(name):
                return other
        return None

    def _is_copy(self, tensor: TensorBits) -> bool:
        """Return True for a tied name whose weights are published under the checkpoint's name."""
        if self._tied is False or not _is_embedding(tensor.name):
            return False
        published = (each for name, each in self._bits.items() if _is_embedding(name))
        return any(
            other.shape == tensor.shape and _cast_equal(tensor, other) for other in published
        )

    def _trouble(self, what: str, names: Iterable[str]) -> None:
        ordered = sorted(names)
        more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
        self._troubles.append(f"{what} {', '.join(ordered[:SHOWN])}{more}")


def _cast_equal(one: TensorBits, other: TensorBits) -> bool:
    import torch

    from weight_transfer import tensor_of

    cast = tensor_of(one).to(getattr(torch, other.dtype))
    return bool(np.array_equal(tensor_bits(one.name, cast, copy=False).bits, other.bits))


def _gathered(tensor: "torch.Tensor") -> "torch.Tensor":
    """The whole tensor; collective for one that is sharded."""
    full = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor if full is None else full()
    return whole
