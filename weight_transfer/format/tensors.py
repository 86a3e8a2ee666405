"""Tensors as bits: arrays of unsigned integers, in which ±0 and NaN payloads stay distinct.

`TensorBits` are in host memory, `DeviceTensor` is on an NVIDIA GPU: a trainer's, to be published,
or an engine's, to be overwritten.

    old = device_tensor(name, parameter)              # a snapshot, on the same GPU
    …a step…
    encode_chunk(old, device_tensor(name, parameter, copy=False), rows, digest)

What goes to the host is what changed; entropy coding, chunks and names are made there.
"""

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
"""Flat array of uint8, uint16, uint32 or uint64: the bits of one weight in each element."""
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
    "F6_E2M3": ("float6_e2m3fn", 1),
    "F6_E3M2": ("float6_e3m2fn", 1),
    "F4": ("float4_e2m1fn_x2", 1),
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
"""Bytes of one element by torch's dtype name."""
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of one weight of a dtype whose elements here are the bytes that weights share."""
SIGNED = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, slots=True)
class WeightClass:
    """Bit field of a weight that gives its magnitude class: `bits` bits from bit `shift` on (0:
    none).

    `field`: bits of one weight, 0 where each element is one.
    """

    shift: int
    bits: int
    field: int = 0

    @property
    def mask(self) -> int:
        """Mask of the field's bits after they are shifted down."""
        return (1 << self.bits) - 1


_EXPONENTS = {
    # The lower eight of eleven exponent bits: no tensor's weights span more.
    "float64": WeightClass(52, 8),
    "float32": WeightClass(23, 8),
    "bfloat16": WeightClass(7, 8),
    "float16": WeightClass(10, 5),
    "float8_e4m3fn": WeightClass(3, 4),
    "float8_e5m2": WeightClass(2, 5),
    "float8_e4m3fnuz": WeightClass(3, 4),
    "float8_e5m2fnuz": WeightClass(2, 5),
    "float6_e2m3fn": WeightClass(3, 2, field=6),
    "float6_e3m2fn": WeightClass(2, 3, field=6),
    "float4_e2m1fn_x2": WeightClass(1, 2, field=4),
    "complex64": WeightClass(23, 8, field=32),
    "bool": WeightClass(0, 1),
}


def unsigned(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return numpy's little-endian unsigned integer type of `width` bytes (1, 2, 4 or 8)."""
    return np.dtype(f"<u{width}")


@dataclass(frozen=True, slots=True)
class Layout:
    """Name, dtype and shape of a checkpoint tensor, in whichever memory its weights are."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows of the tensor: length of its first dimension, 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def weight_class(self) -> WeightClass:
        return weight_class_of(self.dtype)


def weight_class_of(dtype: str) -> WeightClass:
    """Return the exponent bits of a dtype.

    No bits for integers, whose weights are all one class.
    """
    return _EXPONENTS.get(dtype, WeightClass(0, 0))


@dataclass(frozen=True, slots=True)
class TensorBits(Layout):
    """A checkpoint tensor in host memory.

    `bits` is a flat array of `prod(shape)` unsigned integers, row-major.
    """

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

    def zeros(self) -> TensorBits:
        """Return a tensor of the same layout with zero bits.

        Memory is taken only where it is written to.
        """
        bits = np.zeros(self.bits.size, unsigned(WIDTHS[self.dtype]))
        return TensorBits(self.name, self.dtype, self.shape, bits)


def _carried(tensor: torch.Tensor) -> tuple[str, int]:
    """Return (dtype name, bytes of an element) of a torch tensor. Raises TensorFormatError."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in WIDTHS:
        raise TensorFormatError(f"dtype {tensor.dtype} is not carried; use {sorted(WIDTHS)}")
    return dtype, WIDTHS[dtype]


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the bits of a torch tensor as a flat array in host memory.

    It shares memory with a contiguous CPU tensor, and is a copy of any other. Raises
    TensorFormatError.
    """
    import torch

    _, width = _carried(tensor)
    signed: torch.dtype = getattr(torch, SIGNED[width])
    flat = tensor.detach().cpu().contiguous().view(-1)
    bits: Bits = flat.view(signed).numpy().view(unsigned(width))
    return bits


def tensor_bits(name: str, tensor: torch.Tensor, *, copy: bool = True) -> TensorBits:
    """Return a torch tensor as `TensorBits`: a copy, or with `copy=False` a view where possible."""
    bits = bits_of(tensor)
    dtype, _ = _carried(tensor)
    return TensorBits(name, dtype, tuple(tensor.shape), bits.copy() if copy else bits)


def tensor_of(tensor: TensorBits) -> torch.Tensor:
    """Return a new CPU torch tensor with exactly the bits, dtype and shape of `tensor`.

    It is of uint8 where torch does not have the dtype.
    """
    import torch

    dtype: torch.dtype = getattr(torch, tensor.dtype, torch.uint8)
    signed = np.dtype(f"<i{WIDTHS[tensor.dtype]}")
    return torch.from_numpy(tensor.bits.copy().view(signed)).view(dtype).view(tensor.shape)


def copy_tensors(tensors: Mapping[str, TensorBits]) -> dict[str, TensorBits]:
    """Return a deep copy of the tensors, whose bits can be written to."""
    return {name: TensorBits(name, t.dtype, t.shape, t.bits.copy()) for name, t in tensors.items()}


@dataclass(frozen=True, slots=True)
class DeviceBits:
    """Weights in GPU memory as bits: a flat contiguous torch tensor of signed integers.

    The integers are as wide as the weights; signed, since torch does little with unsigned ones.
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
        """Name of the torch device, such as `cuda:0`."""
        return str(self.flat.device)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Type that the bits have once they are copied to the host."""
        return np.dtype(f"<u{self.itemsize}")

    def __getitem__(self, part: slice) -> DeviceBits:
        return DeviceBits(self.flat[part])


Flat: TypeAlias = Bits | DeviceBits
"""Flat array of weights as bits, in host memory or on a device."""


def to_host(values: torch.Tensor) -> Bits:
    """Return a flat tensor of signed integers as a new unsigned array in host memory.

    Wait for the device.
    """
    # On machines without a device, copy too, since the source may be overwritten.
    host: NDArray[Any] = values.cpu().numpy()
    bits: Bits = host.view(f"<u{host.itemsize}")
    return bits.copy() if values.device.type == "cpu" else bits


def to_device(values: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Copy a flat array of integers to the device of `like`.

    Return it as signed integers of its own width.
    """
    import torch

    signed = np.ascontiguousarray(values).view(f"<i{values.itemsize}")
    if not signed.flags.writeable:  # torch warns of memory that it must not write to
        signed = signed.copy()
    return torch.from_numpy(signed).to(like.device)


@dataclass(frozen=True, slots=True)
class DeviceTensor(Layout):
    """A checkpoint tensor in GPU memory; `bits` are its `prod(shape)` weights, row-major."""

    bits: DeviceBits

    def __post_init__(self) -> None:
        if self.bits.size != math.prod(self.shape):
            raise TensorFormatError(
                f"{self.name}: {self.bits.size} elements do not fill shape {self.shape}"
            )

    def zeros(self) -> DeviceTensor:
        """Return a tensor of the same layout with zero bits, on the same device."""
        zeros = DeviceBits(self.bits.flat.new_zeros(self.bits.size))
        return DeviceTensor(self.name, self.dtype, self.shape, zeros)


AnyTensor: TypeAlias = TensorBits | DeviceTensor


def device_bits(tensor: torch.Tensor) -> DeviceBits:
    """Return the bits of a torch tensor as a view of its own memory, on its device.

    Raises TensorFormatError for a dtype that is not carried and for a tensor that is not
    contiguous: what is written to a copy of live weights would read back well and change nothing.
    """
    import torch

    _, width = _carried(tensor)
    if not tensor.is_contiguous():
        raise TensorFormatError(f"a tensor of strides {tensor.stride()} is not contiguous; copy it")
    signed: torch.dtype = getattr(torch, SIGNED[width])
    return DeviceBits(tensor.detach().view(-1).view(signed))


def device_tensor(name: str, tensor: torch.Tensor, *, copy: bool = True) -> DeviceTensor:
    """Return a torch tensor as `DeviceTensor`: a copy on its device, or a view with
    `copy=False`."""
    kept = tensor.detach().contiguous()
    bits = device_bits(kept.clone() if copy and kept.data_ptr() == tensor.data_ptr() else kept)
    return DeviceTensor(name, _carried(tensor)[0], tuple(tensor.shape), bits)
