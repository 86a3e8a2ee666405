"""Rectangles: affine maps from positions of a checkpoint tensor to positions of a vLLM parameter.

A parameter is seen as flat memory: from its first element to its last, gaps of its strides
included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weight_transfer.format.tensors import SIGNED, Bits, unsigned
from weight_transfer.kernels.cpu.changes import Int64s, locate, sum_rectangle
from weight_transfer.kernels.triton.device_bits import DeviceBits

if TYPE_CHECKING:
    import torch


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` as signed integers of its width, writable, on its device."""
    import torch

    signed: torch.dtype = getattr(torch, SIGNED[tensor.element_size()])
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


_MAX_REPEATS = 4096


class UnmappableError(Exception):
    """Two views are no rectangle: positions of the source overlap."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Source offset + Σ at·source stride ↔ target offset + Σ at·target stride, for all `at`.

    All counts are elements: of the flat checkpoint tensor `source`, and of the parameter `target`
    from its first element on. Source strides fall and nest, so a position has one way to be said.
    """

    source: str
    target: str
    source_offset: int
    target_offset: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def source_key(self) -> tuple[int, ...]:
        """Key of its positions in the checkpoint tensor, the same on every rank."""
        return (self.source_offset, *self.shape, *self.source_strides)

    @property
    def bounds(self) -> tuple[int, int]:
        """First position of the source, and the one after the last."""
        return self.source_offset, self.source_offset + 1 + _reach(self.shape, self.source_strides)

    def locate(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        """Return (those of ascending flat `indices` that lie in it, their places in the parameter).

        The first are positions in `indices`.
        """
        first, end = np.searchsorted(indices, self.bounds)
        if self.source_strides == (1,):
            shift = self.target_offset - self.source_offset
            if self.target_strides == (1,):
                return np.arange(first, end), indices[first:end] + shift
        picked, places = np.empty((2, end - first + 1), np.int64)
        count = locate(indices[first:end], *self._arrays(), picked, places)
        return picked[:count] + first, places[:count].copy()

    def digest_part(self, flat: Bits) -> int:
        """Return what its weights, read from the parameter `flat`, add to the source's digest."""
        return int(sum_rectangle(flat, *self._arrays()))

    def pieces(self, elements: int) -> Iterator[Rectangle]:
        """Cut it along its first dimension into parts of about `elements`."""
        inner = max(1, self.elements // max(1, self.shape[0]))
        step = max(1, elements // inner)
        for at in range(0, self.shape[0], step):
            yield Rectangle(
                self.source,
                self.target,
                self.source_offset + at * self.source_strides[0],
                self.target_offset + at * self.target_strides[0],
                (min(step, self.shape[0] - at), *self.shape[1:]),
                self.source_strides,
                self.target_strides,
            )

    def _arrays(self) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        return (
            np.array((self.source_offset, self.target_offset), np.int64),
            np.array(self.shape, np.int64),
            np.array(self.source_strides, np.int64),
            np.array(self.target_strides, np.int64),
        )


def rectangles(
    names: tuple[str, str],
    offsets: tuple[int, int],
    shape: tuple[int, ...],
    source_strides: tuple[int, ...],
    target_strides: tuple[int, ...],
) -> list[Rectangle]:
    """Bring two views of one shape into the normal form; a broadcast source gives one for each.

    `names` and `offsets`: (source, target). Raises UnmappableError.
    """
    dims = [d for d in zip(shape, source_strides, target_strides, strict=True) if d[0] != 1]
    if any(n == 0 for n, _, _ in dims):
        return []
    repeats = [(n, t) for n, s, t in dims if s == 0]
    if math.prod(n for n, _ in repeats) > _MAX_REPEATS:
        raise UnmappableError(f"{names[0]} is repeated too often in {names[1]}")
    merged = _merged([d for d in dims if d[1] != 0])
    sizes, sources, targets = (tuple(d[k] for d in merged) for k in range(3))
    if any(s <= _reach(sizes[k + 1 :], sources[k + 1 :]) for k, s in enumerate(sources)):
        raise UnmappableError(f"parts of {names[0]} overlap")
    parts = []
    for at in itertools.product(*(range(n) for n, _ in repeats)):
        shift = sum(a * t for a, (_, t) in zip(at, repeats, strict=True))
        parts.append(Rectangle(*names, offsets[0], offsets[1] + shift, sizes, sources, targets))
    return parts


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Order (size, source stride, target stride) by source; join what is one run in both."""
    joined: list[tuple[int, int, int]] = []
    for size, source, target in sorted(dims, key=lambda dim: -dim[1]):
        if joined and joined[-1][1:] == (source * size, target * size):
            joined[-1] = (joined[-1][0] * size, source, target)
        else:
            joined.append((size, source, target))
    return joined or [(1, 1, 1)]


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
