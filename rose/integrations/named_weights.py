"""Named tensors of a trainer as the bits of its checkpoint: dtypes, tied names, wrappers' prefixes.

The checkpoint that replicas started with decides: each of its tensors is published, in its dtype.
A trainer's own name of a tensor may have wrappers' prefixes. Two names are one (tied) tensor only
if the model's config says so; equal values are no sign of it, since all norms of ones are equal.
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
# Modules of input and output embeddings: one tensor in a model with `tie_word_embeddings`.
_INPUT = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
# Types that master weights are cast to; an 8-bit float needs scales, which only a trainer knows.
_CAST = ("float64", "float32", "bfloat16", "float16")
_OUTPUT = ("lm_head", "embed_out", "output")
Named = Iterable[tuple[str, "torch.Tensor"]]


class UnfitWeightsError(RefusedError):
    """Error: a trainer's tensors do not fit the checkpoint that replicas started with (names,
    shapes, dtypes).
    """


def checkpoint_name(name: str) -> str:
    """Return a parameter's name without the parts that `torch.compile`, FSDP, activation
    checkpointing and DDP add to it.
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def ties_embeddings(model_dir: Path) -> bool | None:
    """Return `tie_word_embeddings` of a model folder's config.json; None if the file or the field
    is missing.

    The value in `text_config`, which models of several parts have, takes precedence.
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
    """Return True if a tensor's name is that of an input or output embedding's weight."""
    parts = name.split(".")
    return parts[-1] == "weight" and len(parts) > 1 and parts[-2] in (*_INPUT, *_OUTPUT)


class NamedWeights:
    """Collector of one version's tensors, checked against those of the checkpoint `base` (names,
    dtypes, shapes).

    tied: the model's config ties its input and output embeddings. None: the config does not say,
    and they are tied if the checkpoint has only one of them. frozen: beginnings of names, with
    commas between them, of tensors that stay as in `base`; what a trainer gives of them is left
    out.

    Every tensor of the iterable is visited, whatever is wrong with one before it: gathering a
    DTensor is collective, and the other ranks would wait for a rank that stopped.
    """

    def __init__(
        self, base: Mapping[str, TensorBits], *, tied: bool | None = None, frozen: str = ""
    ) -> None:
        self._base = base
        self._frozen = tuple(filter(None, frozen.split(",")))
        self._tied = tied
        self._bits: dict[str, TensorBits] = {}
        self._others: dict[str, TensorBits] = {}
        self._troubles: list[str] = []

    def take(self, named: Named, *, keep: bool = True) -> None:
        """Gather every tensor from its ranks, and keep a copy in the checkpoint's dtype if `keep`.

        keep: True on the rank that publishes; the others only take part in gathering. Tensors that
        do not fit are noted, and `finish` raises for them.
        """
        for name, tensor in named:
            whole = gathered(tensor)
            if keep:
                self._take(checkpoint_name(name), whole)

    def finish(self) -> dict[str, TensorBits]:
        """Return all tensors of the checkpoint, by name.

        Raises `UnfitWeightsError` if a tensor is missing, unknown, or of another shape or dtype.
        """
        for begin in self._frozen:
            found = {name: each for name, each in self._base.items() if name.startswith(begin)}
            self._bits |= found
            if not found:
                self._troubles.append(f"frozen: the checkpoint has no {begin}…")
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

        if name.startswith(self._frozen):
            return
        want = self._base.get(name)
        if want is None:
            if "lora_" in name:
                self._troubles[:] = [
                    "adapters are not published among weights; publish them alone, or merge them"
                ]
            try:
                self._others[name] = tensor_bits(name, tensor)
            except TensorFormatError as error:
                self._troubles.append(f"the checkpoint has no {name}, and its {error}")
            return
        if tuple(tensor.shape) != want.shape:
            self._troubles.append(f"{name} is {tuple(tensor.shape)}, not {want.shape}")
            return
        # Bytes that weights share are uint8 where torch does not have their dtype.
        dtype = getattr(torch, want.dtype, torch.uint8)
        castable = want.dtype in _CAST and str(tensor.dtype).removeprefix("torch.") in _CAST
        if tensor.dtype != dtype and not castable:
            self._troubles.append(f"{name} is {tensor.dtype}, which is not cast to {want.dtype}")
            return
        bits = TensorBits(name, want.dtype, want.shape, cast_bits(name, tensor, want.dtype).bits)
        before = self._bits.get(name)
        if before is not None and not np.array_equal(before.bits, bits.bits):
            self._troubles.append(f"the trainer gives {name} twice, with other values")
            return
        self._bits[name] = bits

    def _twin(self, tensor: TensorBits, among: Mapping[str, TensorBits]) -> TensorBits | None:
        """Return the published embedding of the same shape and dtype, to which the config ties this
        one; None if there is none.
        """
        for name, other in among.items():
            alike = other.shape == tensor.shape and other.dtype == tensor.dtype
            if name != tensor.name and alike and _is_embedding(name):
                return other
        return None

    def _is_copy(self, tensor: TensorBits) -> bool:
        """Return True if an embedding that the checkpoint does not name equals one that is
        published under the checkpoint's name.
        """
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


def cast_bits(name: str, tensor: "torch.Tensor", dtype: str | None) -> TensorBits:
    """Return the bits of a copy of a tensor in host memory, cast to `dtype` if both are types that
    master weights are cast to.
    """
    import torch

    own = str(tensor.dtype).removeprefix("torch.")
    wanted = getattr(torch, dtype) if dtype in _CAST and own in _CAST else tensor.dtype
    return tensor_bits(name, tensor.detach().to("cpu", wanted))


def gathered(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the whole tensor; for a DTensor this is a collective call of all ranks."""
    full = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor if full is None else full()
    return whole
