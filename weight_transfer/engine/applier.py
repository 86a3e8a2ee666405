"""Applier of an update: exchanges changed values in live parameters in O(changed), on any device.

place   while serving: find the changes that live on this rank, bring them to their device
write   under the pause: compare with the old, write the new, read back

Opaque parameters, whose loader transforms weights, are copied from a fresh load, whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from weight_transfer.engine.loader_map import LoaderMap
from weight_transfer.engine.rectangle import flat_view
from weight_transfer.format.tensors import Bits
from weight_transfer.kernels.backend import Exchange, RangeChange, processor_of
from weight_transfer.receiver import StagedUpdate

if TYPE_CHECKING:
    import torch


class OpaqueCopy:
    """One exchange of all loose parameters, that can be taken back."""

    def __init__(self, loader_map: LoaderMap, fresh: Mapping[str, torch.Tensor]) -> None:
        self._live = {name: loader_map.parameter(name) for name in fresh}
        self._fresh = fresh
        self._old: dict[str, torch.Tensor] = {}

    def write(self) -> tuple[str, ...]:
        """Copy in place, so that nobody's pointer dangles; returns those that read otherwise."""
        import torch

        wrong = []
        with torch.inference_mode():
            for name, live in self._live.items():
                self._old.setdefault(name, flat_view(live).clone())
                fresh = self._fresh[name]
                if (live.shape, live.stride()) != (fresh.shape, fresh.stride()):
                    wrong.append(name)
                    continue
                flat_view(live).copy_(flat_view(fresh))
                if not torch.equal(flat_view(live), flat_view(fresh)):
                    wrong.append(name)
        return tuple(wrong)

    def write_back(self) -> None:
        """Put back what `write` found."""
        import torch

        with torch.inference_mode():
            for name, old in self._old.items():
                flat_view(self._live[name]).copy_(old)


RESIDENT_BYTES: Final = 2 << 30
"""Most memory of a device that staged changes take: 2% of 13 billion bf16 weights."""


@dataclass(frozen=True, slots=True)
class PlacedChange:
    """Changes of one checkpoint tensor that land in one parameter of this rank.

    At `places` of the parameter's memory `old` becomes `new`, in the order of the checkpoint.
    """

    tensor: str
    parameter: str
    places: NDArray[np.int64]
    old: Bits
    new: Bits


@dataclass(frozen=True, slots=True)
class ParameterSlices:
    """This rank's part of an update; each exchange has as many changes as its parts."""

    groups: tuple[tuple[tuple[PlacedChange, ...], Exchange], ...]

    @property
    def parts(self) -> tuple[PlacedChange, ...]:
        return tuple(part for parts, _ in self.groups for part in parts)


def place(
    loader_map: LoaderMap, staged: StagedUpdate, resident_bytes: int = RESIDENT_BYTES
) -> ParameterSlices:
    """Find this rank's part of an update and bring it to where it will be written.

    Reads no weight: the engine may serve meanwhile. Raises DeviceMemoryError.
    """
    groups: dict[str, list[PlacedChange]] = defaultdict(list)
    for part in _parts(loader_map, staged):
        groups[str(loader_map.parameter(part.parameter).device)].append(part)
    return ParameterSlices(
        tuple((tuple(p), _staged(loader_map, p, resident_bytes)) for p in groups.values())
    )


def write(placement: ParameterSlices) -> tuple[str, ...]:
    """Write the new values.

    Returns the parameters whose old bytes or new bytes are not the expected ones. If there are
    none and the digests were right before, they are right now, since those of the staged update
    were checked against its manifest.
    """
    unproven = []
    for parts, exchange in placement.groups:
        found = exchange.run()
        unproven += [part.parameter for part, odd in zip(parts, found, strict=True) if odd.any()]
    return tuple(unproven)


def write_back(placement: ParameterSlices) -> None:
    """Write the old values; rerunning it is harmless."""
    for _, exchange in placement.groups:
        exchange.run(back=True)


def _parts(loader_map: LoaderMap, staged: StagedUpdate) -> Iterator[PlacedChange]:
    for change in staged.tensors:
        for rectangle in loader_map.rectangles(change.name):
            picked, places = rectangle.locate(change.indices)
            if picked.size:
                old, new = change.old_values[picked], change.values[picked]
                yield PlacedChange(change.name, rectangle.target, places, old, new)


def _staged(loader_map: LoaderMap, parts: list[PlacedChange], resident_bytes: int) -> Exchange:
    changes = [RangeChange(loader_map.bits(p.parameter), p.places, p.old, p.new) for p in parts]
    return processor_of(*(change.target for change in changes)).stage(changes, resident_bytes)
