"""Weights on a device as bits: what a numpy array of unsigned integers is on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from weight_transfer.format.tensors import Bits


@dataclass(frozen=True, slots=True)
class DeviceBits:
    """`flat`: contiguous, of one dimension, signed integers as wide as the weights.

    Signed, since torch does little with unsigned ones; kernels look at the bits alone.
    """

    flat: torch.Tensor

    @property
    def size(self) -> int:
        return self.flat.numel()

    @property
    def itemsize(self) -> int:
        return self.flat.element_size()

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def place(self) -> str:
        return str(self.flat.device)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Type of the bits on the host."""
        return np.dtype(f"<u{self.itemsize}")

    def __getitem__(self, part: slice) -> DeviceBits:
        return DeviceBits(self.flat[part])


def to_host(values: torch.Tensor) -> Bits:
    """Copy a flat tensor of signed integers to the host; waits for what computes it."""
    # A copy of its own on machines without a device too: nobody shares what may be overwritten.
    host: NDArray[Any] = values.cpu().numpy()
    bits: Bits = host.view(f"<u{host.itemsize}")
    return bits.copy() if values.device.type == "cpu" else bits


def to_device(values: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Copy a flat array of integers to where `like` is, as signed integers of its own width."""
    import torch

    signed = np.ascontiguousarray(values).view(f"<i{values.itemsize}")
    if not signed.flags.writeable:  # torch warns of memory that it must not write to
        signed = signed.copy()
    return torch.from_numpy(signed).to(like.device)
