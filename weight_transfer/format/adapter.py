"""LoRA adapter as a policy: tensors by PEFT's names, and the base that they have to fit.

base_model.model.<module>.lora_A.weight   [r, columns of the module's weight]
base_model.model.<module>.lora_B.weight   [rows of the module's weight, r]
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final, Protocol

import blake3

from weight_transfer.errors import AdapterError
from weight_transfer.format.manifest import Adapter

_NAME: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class Shaped(Protocol):
    """Tensor or entry of a manifest that has a shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def base_digest(digests: Mapping[str, int]) -> str:
    """Return the name of a checkpoint as a base of adapters: 64 hex digits of a hash over the
    digests of its tensors.
    """
    lines = (f"{name} {digests[name]:016x}\n" for name in sorted(digests))
    return blake3.blake3("".join(lines).encode()).hexdigest()


def check_adapter(
    adapter: Adapter, tensors: Mapping[str, Shaped], base: Mapping[str, Shaped]
) -> None:
    """Raise AdapterError that names the first tensor of an adapter that does not fit `base`, the
    tensors of the checkpoint that it adapts.
    """
    modules: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, tensor in tensors.items():
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise AdapterError(
                f"{name} is not carried: an adapter consists of lora_A and lora_B of linear"
                " layers, without bias, DoRA and modules_to_save"
            )
        modules[parts[1]][f"lora_{parts[2]}"] = tuple(tensor.shape)
    if not modules:
        raise AdapterError("the adapter has no tensors; train some target_modules")
    for module, shapes in modules.items():
        weight = base.get(f"{module}.weight")
        if weight is None or len(weight.shape) != 2:
            raise AdapterError(f"target_modules: the base has no linear layer {module}")
        rows, columns = weight.shape
        wanted = {"lora_A": (adapter.r, columns), "lora_B": (rows, adapter.r)}
        for part, shape in wanted.items():
            if shapes.get(part) != shape:
                raise AdapterError(
                    f"{module}.{part} is {shapes.get(part, 'missing')}, and r={adapter.r} and the"
                    f" base make it {shape}"
                )
