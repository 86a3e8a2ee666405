"""Tensors as bits: the only view in which ±0 and NaN payloads are weights too."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import TensorFormatError

if TYPE_CHECKING:
    import torch

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Flat array of uint8, uint16, uint32 or uint64, one per weight."""

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element by dtype name (torch's names)."""

_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAX_HEADER_BYTES = 100_000_000


def unsigned(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the little-endian unsigned integer type of `width` bytes (1, 2, 4 or 8)."""
    return np.dtype(f"<u{width}")


@dataclass(frozen=True, slots=True)
class TensorBits:
    """One checkpoint tensor: `bits` is flat, of `prod(shape)` unsigned integers, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
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

    @property
    def rows(self) -> int:
        """Length of the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the bits of `tensor`, flat; shares memory with a contiguous CPU tensor."""
    import torch

    width = tensor.element_size()
    if width not in (2, 4, 8) or not tensor.is_floating_point():
        raise TensorFormatError(f"dtype {tensor.dtype} is not carried; use {sorted(WIDTHS)}")
    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
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


def read_safetensors(path: Path) -> dict[str, TensorBits]:
    """Read every tensor of one safetensors file as bits, nothing converted."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise TensorFormatError(f"{path}: not a safetensors file (header of {length} bytes)")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise TensorFormatError(f"{path}: header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise TensorFormatError(f"{path}: header is not a JSON object")
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=0)[8 + length :]
    return {
        name: _entry(path, name, entry, data)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _entry(path: Path, name: str, entry: dict[str, Any], data: NDArray[np.uint8]) -> TensorBits:
    try:
        dtype = _SAFETENSORS_DTYPES[entry["dtype"]]
        shape = tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise TensorFormatError(f"{path}: cannot read the entry of {name}: {entry}") from error
    if not 0 <= begin <= end <= data.size or end - begin != math.prod(shape) * WIDTHS[dtype]:
        raise TensorFormatError(f"{path}: {name} has offsets {begin}..{end} for shape {shape}")
    bits = np.array(data[begin:end]).view(unsigned(WIDTHS[dtype]))
    return TensorBits(name, dtype, shape, bits)


def read_model_dir(model_dir: Path) -> dict[str, TensorBits]:
    """Read all `*.safetensors` of a Hugging Face model directory."""
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise TensorFormatError(f"{model_dir}: no *.safetensors in it; save the model there first")
    tensors: dict[str, TensorBits] = {}
    for path in paths:
        for name, tensor in read_safetensors(path).items():
            if name in tensors:
                raise TensorFormatError(f"{path}: {name} is in another file of {model_dir} too")
            tensors[name] = tensor
    return tensors


def copy_tensors(tensors: Mapping[str, TensorBits]) -> dict[str, TensorBits]:
    """Return a deep copy whose bits can be written to."""
    return {name: TensorBits(name, t.dtype, t.shape, t.bits.copy()) for name, t in tensors.items()}
