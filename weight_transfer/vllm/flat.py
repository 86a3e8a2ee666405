"""A parameter as flat memory: from its first element to its last, gaps of its strides included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weight_transfer.kernels.device.bits import DeviceBits
from weight_transfer.tensors import Bits, unsigned

if TYPE_CHECKING:
    import torch


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` as signed integers of its width, writable, on its device."""
    import torch

    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    raw = tensor.detach()
    if raw.numel() == 0:
        return raw.view(-1).view(signed)
    strided = zip(raw.shape, raw.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in strided)
    return raw.as_strided((extent,), (1,)).view(signed)


def live_bits(tensor: torch.Tensor) -> Bits | DeviceBits:
    """The memory itself as bits, where it is: gaps of its strides included."""
    return flat_bits(tensor) if tensor.device.type == "cpu" else DeviceBits(flat_view(tensor))


def flat_bits(tensor: torch.Tensor) -> Bits:
    """The same as bits: the memory itself on CPU, a copy of it from a device."""
    bits: Bits = flat_view(tensor).cpu().numpy().view(unsigned(tensor.element_size()))
    return bits.view(np.ndarray)
