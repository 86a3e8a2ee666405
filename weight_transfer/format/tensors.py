"""Tensors as bits: the only view in which ±0 and NaN payloads are weights too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import TensorFormatError

if TYPE_CHECKING:
    import torch

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Flat array of uint8, uint16, uint32 or uint64, one per weight."""


@dataclass(frozen=True, slots=True)
class WeightClass:
    """Bits of a weight that give its magnitude: `bits` of them from bit `shift` on (0: none)."""

    shift: int
    bits: int

    @property
    def mask(self) -> int:
        """Mask of the bits once they are shifted down."""
        return (1 << self.bits) - 1


_EXPONENTS = {
    # The lower eight of eleven exponent bits: no tensor's weights span more.
    "float64": WeightClass(52, 8),
    "float32": WeightClass(23, 8),
    "bfloat16": WeightClass(7, 8),
    "float16": WeightClass(10, 5),
    "float8_e4m3fn": WeightClass(3, 4),
    "float8_e5m2": WeightClass(2, 5),
}
SAFETENSORS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
WIDTHS = dict(SAFETENSORS.values())
"""Bytes of one element by dtype name (torch's names)."""
SIGNED = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def unsigned(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the little-endian unsigned integer type of `width` bytes (1, 2, 4 or 8)."""
    return np.dtype(f"<u{width}")


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a checkpoint tensor, wherever its weights are."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Length of the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def weight_class(self) -> WeightClass:
        return weight_class_of(self.dtype)


def weight_class_of(dtype: str) -> WeightClass:
    """Return the bits that classify weights of a dtype; integers have one class."""
    return _EXPONENTS.get(dtype, WeightClass(0, 0))


@dataclass(frozen=True, slots=True)
class TensorBits(Layout):
    """One checkpoint tensor: `bits` is flat, of `prod(shape)` unsigned integers, row-major."""

    bits: Bits

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise TensorFormatError(
                f"{self.name}: dtype {self.dtype} is not carried; use one of {sorted(WIDTHS)}"
            )
        expected = unsigned(WIDTHS[self.dtype])
        if self.bits.ndim != 1 or self.bits.dtype != expected:
            raise TensorFormatError(f"{self.name}: bits must be a flat array of {expected}")
        if self.bits.size != math.prod(self.shape):
            raise TensorFormatError(
                f"{self.name}: {self.bits.size} elements do not fill shape {self.shape}"
            )


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the bits of `tensor`, flat; shares memory with a contiguous CPU tensor."""
    import torch

    width = WIDTHS.get(str(tensor.dtype).removeprefix("torch."))
    if width is None:
        raise TensorFormatError(f"dtype {tensor.dtype} is not carried; use {sorted(WIDTHS)}")
    signed: torch.dtype = getattr(torch, SIGNED[width])
    flat = tensor.detach().cpu().contiguous().view(-1)
    bits: Bits = flat.view(signed).numpy().view(unsigned(width))
    return bits


def tensor_bits(name: str, tensor: torch.Tensor, *, copy: bool = True) -> TensorBits:
    """Return `tensor` as `TensorBits`, a snapshot unless `copy` is False."""
    bits = bits_of(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorBits(name, dtype, tuple(tensor.shape), bits.copy() if copy else bits)


def tensor_of(tensor: TensorBits) -> torch.Tensor:
    """Return a torch tensor (CPU, own memory) with exactly these bits."""
    import torch

    dtype: torch.dtype = getattr(torch, tensor.dtype)
    signed = np.dtype(f"<i{WIDTHS[tensor.dtype]}")
    return torch.from_numpy(tensor.bits.copy().view(signed)).view(dtype).view(tensor.shape)


def zeros_like(tensor: TensorBits) -> TensorBits:
    """Return a tensor of zeros, which takes no memory until it is written to."""
    bits = np.zeros(tensor.bits.size, unsigned(WIDTHS[tensor.dtype]))
    return TensorBits(tensor.name, tensor.dtype, tensor.shape, bits)


def copy_tensors(tensors: Mapping[str, TensorBits]) -> dict[str, TensorBits]:
    """Return a deep copy whose bits can be written to."""
    return {name: TensorBits(name, t.dtype, t.shape, t.bits.copy()) for name, t in tensors.items()}
