"""Named tensors of a trainer as the bits of its checkpoint: dtypes, tied names, wrappers' prefixes.

What replicas started with decides: each of its tensors is published, in its dtype. A trainer's own
name for it may carry what wrappers put in front; a name that the checkpoint lacks is another name
of weights that it has (tied), or an error.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rose.errors import RefusedError
from weight_transfer import TensorBits, tensor_bits

if TYPE_CHECKING:
    import torch

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
SHOWN = 4
Named = Iterable[tuple[str, "torch.Tensor"]]


class UnfitWeightsError(RefusedError):
    """What a trainer holds does not fit the checkpoint that replicas started with."""


def checkpoint_name(name: str) -> str:
    """The name without what `torch.compile`, FSDP and activation checkpointing put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


class NamedWeights:
    """Collects one version; `base` says names, dtypes and shapes.

    Every tensor of the iterable is visited, whatever is wrong with one before it: gathering a
    DTensor is collective, and a rank that stopped would be waited for.
    """

    def __init__(self, base: Mapping[str, TensorBits]) -> None:
        self._base = base
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
        for name in self._base.keys() - self._bits.keys():
            twin = self._twin(self._base[name], self._base)
            if twin is not None and twin in self._bits:
                bits = self._bits[twin]
                self._bits[name] = TensorBits(name, bits.dtype, bits.shape, bits.bits)
        strange = [n for n, each in self._others.items() if self._twin(each, self._bits) is None]
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
            self._others[name] = tensor_bits(name, tensor)
            return
        if tuple(tensor.shape) != want.shape:
            self._troubles.append(f"{name} is {tuple(tensor.shape)}, not {want.shape}")
            return
        cast = tensor.detach().to("cpu", getattr(torch, want.dtype))
        self._bits[name] = tensor_bits(name, cast)

    def _twin(self, tensor: TensorBits, among: Mapping[str, TensorBits]) -> str | None:
        """Another name of the same weights, but for the dtype they were cast to."""
        for name, other in among.items():
            if other.name == tensor.name or other.shape != tensor.shape:
                continue
            if other.dtype == tensor.dtype and np.array_equal(other.bits, tensor.bits):
                return name
            if other.dtype != tensor.dtype and _cast_equal(tensor, other):
                return name
        return None

    def _trouble(self, what: str, names: Iterable[str]) -> None:
        found = sorted(names)
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        self._troubles.append(f"{what} {', '.join(found[:SHOWN])}{more}")


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
