"""Ranges of which many weights changed: a map of them, or all of them anew.

Which is the shorter is seen on a sample; what is longer than the weights themselves is never kept.
Weights are looked at a stretch at a time, and planes are made one after the other, so that hardly
more memory is held than what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.planes import split_plane
from weight_transfer.kernels.processor import Flat, processor_of
from weight_transfer.planes import PLANE_HEADER, Part, pack_plane, pack_planes

_STRETCH = 1 << 20
_SAMPLE = 1 << 16
_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class Crowded:
    """`parts` of the payload; `growth` of the tensor's digest, mod 2^64."""

    mapped: bool
    changed: int
    parts: list[Part]
    growth: int

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return sum(len(part) for part in self.parts)


def encode_crowded(old: Flat, new: Flat, first: int) -> Crowded:
    """Encode a range whose first weight has index `first` in its tensor."""
    if old.size <= _SAMPLE:
        return min(_mapped(old, new, first), _anew(old, new, first), key=lambda made: made.size)
    some = slice(0, _SAMPLE)
    sample = old[some], new[some], first
    ways = (_mapped, _anew) if _mapped(*sample).size <= _anew(*sample).size else (_anew, _mapped)
    made = ways[0](old, new, first)
    raw_bytes = old.nbytes + old.itemsize * PLANE_HEADER.size
    if made.size <= raw_bytes:
        return made
    del made
    return min((way(old, new, first) for way in (_anew, _mapped)), key=lambda each: each.size)


def _mapped(old: Flat, new: Flat, first: int) -> Crowded:
    """A bit for each weight, then what the marked ones change by."""
    processor = processor_of(old, new)
    bitmap = np.empty((old.size + 7) // 8, np.uint8)
    # Only what is written to takes memory.
    planes: list[NDArray[np.uint8] | None] = [
        np.empty(old.size, np.uint8) for _ in range(old.itemsize)
    ]
    changed, growth = 0, 0
    for at in range(0, old.size, _STRETCH):
        part = slice(at, at + _STRETCH)
        marks = processor.mark(old[part], new[part], first + at)
        bitmap[at // 8 : at // 8 + marks.bitmap.size] = marks.bitmap
        end = changed + marks.codes.size
        for number, plane in enumerate(planes):
            assert plane is not None
            split_plane(marks.codes, number, plane[changed:end])
        changed, growth = end, growth + marks.growth
    parts = pack_plane(bitmap)
    for number in range(len(planes)):
        plane, planes[number] = planes[number], None
        assert plane is not None
        parts += pack_planes(plane[:changed], 1)
        del plane
    return Crowded(True, changed, parts, growth % _MODULUS)


def _anew(old: Flat, new: Flat, first: int) -> Crowded:
    """All new weights."""
    processor = processor_of(old, new)
    changed, growth = 0, 0
    for at in range(0, old.size, _STRETCH):
        part = slice(at, at + _STRETCH)
        marks = processor.mark(old[part], new[part], first + at)
        changed, growth = changed + marks.codes.size, growth + marks.growth
    parts = pack_planes(processor.read(new), new.itemsize)
    return Crowded(False, changed, parts, growth % _MODULUS)
