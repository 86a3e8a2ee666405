"""Torch tensors as `LocalTensor`: a chunk at a time crosses to the host and becomes bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from weight_transfer.tensors import Bits, bits_of


class TorchWeights:
    """A rank's own part of a tensor, cast to `dtype` as it is read."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._flat = local.detach().contiguous().view(-1)
        cast = dtype is not None and local.is_floating_point()
        self._dtype = dtype if cast and dtype is not None else local.dtype

    @property
    def dtype(self) -> str:
        """As it is published."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def elements(self) -> int:
        """Weights here."""
        return self._flat.numel()

    def read(self, offset: int, rows: int, width: int, stride: int) -> Bits:
        """See LocalTensor."""
        part = self._flat[offset : offset + (rows - 1) * stride + width]
        if stride != width:
            part = part.as_strided((rows, width), (stride, 1))
        return bits_of(part.to(self._dtype))


def local_weights(
    state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> dict[str, TorchWeights]:
    """Return what this rank holds of `state`; weights are published as `dtype`, None: as they are.

    Nothing is copied before it is read, but what does not lie in order.
    """
    return {name: TorchWeights(tensor, dtype) for name, tensor in state.items()}
