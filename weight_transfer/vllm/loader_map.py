"""Loader map: checkpoint tensor → rows of an engine parameter, proved byte for byte at start.

At tensor parallel size 1 vLLM stacks the parts of a fused module (q, k, v; gate, up) by rows and
leaves everything else as it is, so a flat index within a checkpoint tensor plus one offset is the
flat index within the parameter. The proof is what makes this safe for models that load otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weight_transfer.errors import LoaderMapError
from weight_transfer.tensors import TensorBits, bits_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint tensor lives: `offset` and `elements` count within the flat parameter."""

    tensor: str
    parameter: str
    offset: int
    elements: int


class LoaderMap:
    """Proved destinations of every checkpoint tensor in a live model."""

    def __init__(
        self,
        destinations: Mapping[str, Destination],
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self._destinations = destinations
        self._parameters = parameters

    @classmethod
    def prove(cls, model: torch.nn.Module, base: Mapping[str, TensorBits]) -> LoaderMap:
        """Map `base`, the checkpoint `model` was loaded from, and compare every byte.

        Raises LoaderMapError that names the first tensor or parameter that does not fit.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
        destinations = {name: _destination(name, base, parameters, fused) for name in base}
        loader_map = cls(destinations, parameters)
        for name, tensor in base.items():
            loader_map._prove_tensor(name, tensor)
        loader_map._prove_coverage()
        return loader_map

    def view(self, name: str) -> torch.Tensor:
        """Return the live weights of a checkpoint tensor, flat and writable."""
        found = self._destinations[name]
        flat = self._parameters[found.parameter].data.view(-1)
        return flat[found.offset : found.offset + found.elements]

    def destination(self, name: str) -> Destination:
        """Return where a checkpoint tensor lives."""
        return self._destinations[name]

    def _prove_tensor(self, name: str, tensor: TensorBits) -> None:
        live = self.view(name)
        if str(live.dtype).removeprefix("torch.") != tensor.dtype:
            raise LoaderMapError(
                f"{name} is {tensor.dtype} in the checkpoint and {live.dtype} in the engine; "
                f"start it with --dtype {tensor.dtype}"
            )
        if not np.array_equal(bits_of(live), tensor.bits):
            raise LoaderMapError(
                f"{name} does not lie unchanged in {self._destinations[name].parameter}: the "
                "loader transforms it, or the engine serves another checkpoint than this base"
            )

    def _prove_coverage(self) -> None:
        mapped: dict[int, int] = {}
        for found in self._destinations.values():
            pointer = self._parameters[found.parameter].data_ptr()
            mapped[pointer] = max(mapped.get(pointer, 0), found.offset + found.elements)
        for name, parameter in self._parameters.items():
            end = mapped.get(parameter.data_ptr(), 0)
            # Vocabularies are padded at the end; no logit or embedding of the padding is used.
            if end == 0 or (end < parameter.numel() and "embed" not in name and "head" not in name):
                raise LoaderMapError(f"nothing in the checkpoint fills parameter {name} to its end")


def _destination(
    name: str,
    base: Mapping[str, TensorBits],
    parameters: Mapping[str, torch.Tensor],
    fused: Mapping[str, list[str]],
) -> Destination:
    tensor = base[name]
    target, offset = _target(name, base, parameters, fused)
    parameter = parameters[target]
    if parameter.numel() == 0:
        raise LoaderMapError(
            f"{target} is empty: the engine packed its weights away; start it with "
            "VLLM_PLUGINS=rose_unpacked and ROSE_ROLE=guest or dedicated"
        )
    fits = offset + tensor.bits.size <= parameter.numel()
    if not parameter.is_contiguous() or tuple(parameter.shape[1:]) != tensor.shape[1:] or not fits:
        raise LoaderMapError(
            f"{name} {tensor.shape} does not fit {target} {tuple(parameter.shape)} by rows; "
            "only tensor parallel size 1 without quantisation is supported"
        )
    return Destination(name, target, offset, tensor.bits.size)


def _target(
    name: str,
    base: Mapping[str, TensorBits],
    parameters: Mapping[str, torch.Tensor],
    fused: Mapping[str, list[str]],
) -> tuple[str, int]:
    """Return (parameter name, element offset) of a checkpoint tensor."""
    if name in parameters:
        return name, 0
    path = name.split(".")
    for whole, parts in fused.items():
        for at, piece in enumerate(path[:-1]):
            if piece not in parts or len(parts) < 2:
                continue
            siblings = [".".join([*path[:at], part, *path[at + 1 :]]) for part in parts]
            target = ".".join([*path[:at], whole, *path[at + 1 :]])
            before = siblings[: parts.index(piece)]
            if target in parameters and all(sibling in base for sibling in before):
                return target, sum(base[sibling].bits.size for sibling in before)
    raise LoaderMapError(f"the engine has no parameter for checkpoint tensor {name}")
