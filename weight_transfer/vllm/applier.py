"""Applier: O(changed) exchange of staged absolute values in live parameters, wherever they are.

place   while serving: which of the changes live on this rank, and where; brought to their device
write   under the pause: compare with the old, write the new, read back
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.exchange import Change, Exchange
from weight_transfer.kernels.processor import processor_of
from weight_transfer.receiver import StagedUpdate
from weight_transfer.tensors import Bits
from weight_transfer.vllm.loader_map import LoaderMap

RESIDENT_BYTES: Final = 2 << 30
"""Most memory of a device that staged changes take: 2% of 13 billion bf16 weights."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Changes of one checkpoint tensor that land in one parameter of this rank.

    At `places` of the parameter's memory `old` becomes `new`, in the order of the checkpoint.
    """

    tensor: str
    parameter: str
    places: NDArray[np.int64]
    old: Bits
    new: Bits


@dataclass(frozen=True, slots=True)
class Placement:
    """This rank's part of an update; each exchange has as many changes as its parts."""

    groups: tuple[tuple[tuple[Placed, ...], Exchange], ...]

    @property
    def parts(self) -> tuple[Placed, ...]:
        """All of them."""
        return tuple(part for parts, _ in self.groups for part in parts)


def place(
    loader_map: LoaderMap, staged: StagedUpdate, resident_bytes: int = RESIDENT_BYTES
) -> Placement:
    """Find this rank's part of an update and bring it to where it will be written.

    Reads no weight: the engine may serve meanwhile. Raises DeviceMemoryError.
    """
    groups: dict[str, list[Placed]] = defaultdict(list)
    for part in _parts(loader_map, staged):
        groups[str(loader_map.parameter(part.parameter).device)].append(part)
    return Placement(
        tuple((tuple(p), _staged(loader_map, p, resident_bytes)) for p in groups.values())
    )


def write(placement: Placement) -> tuple[str, ...]:
    """Write the new values.

    Returns the parameters that are not proven: what was overwritten was not the old version, or
    what can be read there now is not the new one. When both hold for all of them, and the digests
    were right before, they are right now: the staged update's were checked against its manifest.
    """
    unproven = []
    for parts, exchange in placement.groups:
        found = exchange.run()
        unproven += [part.parameter for part, odd in zip(parts, found, strict=True) if odd.any()]
    return tuple(unproven)


def write_back(placement: Placement) -> None:
    """Write the old values; rerunning it is harmless."""
    for _, exchange in placement.groups:
        exchange.run(back=True)


def _parts(loader_map: LoaderMap, staged: StagedUpdate) -> Iterator[Placed]:
    for change in staged.tensors:
        for rectangle in loader_map.rectangles(change.name):
            picked, places = rectangle.locate(change.indices)
            if picked.size:
                old, new = change.old_values[picked], change.values[picked]
                yield Placed(change.name, rectangle.target, places, old, new)


def _staged(loader_map: LoaderMap, parts: list[Placed], resident_bytes: int) -> Exchange:
    changes = [Change(loader_map.bits(p.parameter), p.places, p.old, p.new) for p in parts]
    return processor_of(*(change.target for change in changes)).stage(changes, resident_bytes)
