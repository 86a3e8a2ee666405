"""Applier of an update: exchanges changed values in live parameters in O(changed), on any device.

place   while serving: find the changes that live on this rank, bring them to their device
write   under the pause: compare with the old, write the new, read back

Opaque parameters, whose loader transforms weights, are copied from a fresh load, whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from weight_transfer.engine.loader_map import LoaderMap
from weight_transfer.engine.rectangle import flat_view
from weight_transfer.kernels import processor_of
from weight_transfer.kernels.backend import Change, Exchange
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


ParameterChange: TypeAlias = tuple[str, Change]
"""A parameter of this rank, and what changes in its memory, in the order of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Placement:
    """This rank's part of an update: (changes, their exchange) on each device."""

    groups: tuple[tuple[tuple[ParameterChange, ...], Exchange], ...]

    @property
    def changes(self) -> tuple[ParameterChange, ...]:
        return tuple(each for changes, _ in self.groups for each in changes)


def place(
    loader_map: LoaderMap, staged: StagedUpdate, resident_bytes: int = RESIDENT_BYTES
) -> Placement:
    """Find this rank's part of an update and bring it to where it will be written.

    Reads no weight: the engine may serve meanwhile. Raises DeviceMemoryError.
    """
    groups: dict[str, list[ParameterChange]] = defaultdict(list)
    for name, change in _located(loader_map, staged):
        groups[str(loader_map.parameter(name).device)].append((name, change))
    return Placement(
        tuple((tuple(c), _staged(loader_map, c, resident_bytes)) for c in groups.values())
    )


def write(placement: Placement) -> tuple[str, ...]:
    """Write the new values.

    Returns the parameters whose old bytes or new bytes are not the expected ones. If there are
    none and the digests were right before, they are right now, since those of the staged update
    were checked against its manifest.
    """
    unproven = []
    for changes, exchange in placement.groups:
        counts = exchange.run()
        unproven += [name for (name, _), odd in zip(changes, counts, strict=True) if odd.any()]
    return tuple(unproven)


def write_back(placement: Placement) -> None:
    """Write the old values; rerunning it is harmless."""
    for _, exchange in placement.groups:
        exchange.run(back=True)


def _located(loader_map: LoaderMap, staged: StagedUpdate) -> Iterator[ParameterChange]:
    for tensor in staged.tensors:
        change = tensor.change
        for rectangle in loader_map.rectangles(tensor.name):
            picked, places = rectangle.locate(change.indices)
            if picked.size:
                yield rectangle.target, Change(places, change.old[picked], change.new[picked])


def _staged(loader_map: LoaderMap, changes: list[ParameterChange], resident_bytes: int) -> Exchange:
    targets = [(loader_map.bits(name), change) for name, change in changes]
    return processor_of(*(target for target, _ in targets)).stage(targets, resident_bytes)
