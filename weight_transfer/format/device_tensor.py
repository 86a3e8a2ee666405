"""Weights on an NVIDIA GPU: a trainer's, to be published, or an engine's, to be overwritten.

    old = device_tensor(name, parameter)              # a snapshot, on the same GPU
    …a step…
    encode_chunk(old, device_tensor(name, parameter, copy=False), rows, digest)

What goes to the host is what changed; entropy coding, chunks and names are made there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from weight_transfer.errors import TensorFormatError
from weight_transfer.format import tensors
from weight_transfer.format.tensors import SIGNED, WIDTHS, Layout, TensorBits
from weight_transfer.kernels.triton.device_bits import DeviceBits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DeviceTensor(Layout):
    """One checkpoint tensor on a device; `bits` are `prod(shape)` weights, row-major."""

    bits: DeviceBits

    def __post_init__(self) -> None:
        if self.bits.size != math.prod(self.shape):
            raise TensorFormatError(
                f"{self.name}: {self.bits.size} elements do not fill shape {self.shape}"
            )

    def zeros(self) -> DeviceTensor:
        zeros = DeviceBits(self.bits.flat.new_zeros(self.bits.size))
        return DeviceTensor(self.name, self.dtype, self.shape, zeros)


AnyTensor: TypeAlias = TensorBits | DeviceTensor


def zeros_like(tensor: AnyTensor) -> AnyTensor:
    """Return a tensor of zeros on the same device, the base of a fresh tensor."""
    return tensor.zeros() if isinstance(tensor, DeviceTensor) else tensors.zeros_like(tensor)


def device_bits(tensor: torch.Tensor) -> DeviceBits:
    """Return the bits of `tensor` where it is, in its own memory.

    Raises TensorFormatError for a type that is not carried and for a tensor that is not contiguous:
    what is written to a copy of live weights would read back well and change nothing.
    """
    import torch

    width = WIDTHS.get(str(tensor.dtype).removeprefix("torch."))
    if width is None:
        raise TensorFormatError(f"dtype {tensor.dtype} is not carried; use {sorted(WIDTHS)}")
    if not tensor.is_contiguous():
        raise TensorFormatError(f"a tensor of strides {tensor.stride()} is not contiguous; copy it")
    signed: torch.dtype = getattr(torch, SIGNED[width])
    return DeviceBits(tensor.detach().view(-1).view(signed))


def device_tensor(name: str, tensor: torch.Tensor, *, copy: bool = True) -> DeviceTensor:
    """Return `tensor` as `DeviceTensor`, a snapshot on its device unless `copy` is False."""
    kept = tensor.detach().contiguous()
    bits = device_bits(kept.clone() if copy and kept.data_ptr() == tensor.data_ptr() else kept)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return DeviceTensor(name, dtype, tuple(tensor.shape), bits)
