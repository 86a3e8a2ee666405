"""Applier: O(changed) scatter of staged absolute values into live parameters.

place   while serving: which of the changes live on this rank, and where
write   under the pause: overwrite, read back, and prove what was read
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.rectangles import exchange, sum_picked
from weight_transfer.receiver import StagedTensor, StagedUpdate
from weight_transfer.tensors import Bits
from weight_transfer.vllm.flat import flat_bits
from weight_transfer.vllm.loader_map import LoaderMap

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Placed:
    """Changes of one checkpoint tensor that land in one parameter of this rank.

    `picked` (into the tensor's changes) and `places` (into the parameter's memory) belong together.
    `lost` and `gained`: what the checkpoint's digest loses and gains by these weights.
    """

    parameter: str
    change: StagedTensor
    picked: NDArray[np.int64]
    places: NDArray[np.int64]
    lost: int
    gained: int
    device: DevicePart | None


@dataclass(frozen=True, slots=True)
class DevicePart:
    """Of a parameter on a device: what is uploaded before the pause begins."""

    places: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor


def place(loader_map: LoaderMap, staged: StagedUpdate) -> tuple[Placed, ...]:
    """Find this rank's part of an update. Reads no weight: the engine may serve meanwhile."""
    found = []
    for change in staged.tensors:
        for rectangle in loader_map.rectangles(change.name):
            picked, places = rectangle.locate(change.indices)
            if not picked.size:
                continue
            lost = int(sum_picked(change.indices, picked, change.old_values))
            gained = int(sum_picked(change.indices, picked, change.values))
            live = loader_map.flat(rectangle.target)
            device = None if live.device.type == "cpu" else _upload(change, picked, places, live)
            found.append(Placed(rectangle.target, change, picked, places, lost, gained, device))
    return tuple(found)


def write(loader_map: LoaderMap, placed: Sequence[Placed]) -> tuple[str, ...]:
    """Write the new values; rerunning it is harmless.

    Returns the parameters that are not proven: what was overwritten was not the old version, or
    what can be read there now is not the new one.
    """
    unproven = []
    for part in placed:
        lost, gained, wrong = _exchange(loader_map, part, back=False)
        if (lost, gained, wrong) != (part.lost, part.gained, 0):
            unproven.append(part.parameter)
    return tuple(unproven)


def write_back(loader_map: LoaderMap, placed: Sequence[Placed]) -> None:
    """Write the old values."""
    for part in placed:
        _exchange(loader_map, part, back=True)


def _exchange(loader_map: LoaderMap, part: Placed, *, back: bool) -> tuple[int, int, int]:
    """Returns (what the digest lost, what it gained, weights that do not read as written)."""
    change = part.change
    values = change.old_values if back else change.values
    if part.device is not None:
        return _exchange_on_device(loader_map, part, part.device, values, back=back)
    flat = flat_bits(loader_map.parameter(part.parameter))
    lost, gained, wrong = exchange(flat, part.places, values, change.indices, part.picked)
    return int(lost), int(gained), wrong


def _exchange_on_device(
    loader_map: LoaderMap, part: Placed, uploaded: DevicePart, values: Bits, *, back: bool
) -> tuple[int, int, int]:
    """The same by torch. What is overwritten and what is read back come here, O(changed)."""
    import torch

    live = loader_map.flat(part.parameter)
    with torch.inference_mode():
        before = live.index_select(0, uploaded.places)
        live.index_copy_(0, uploaded.places, uploaded.old if back else uploaded.new)
        after = live.index_select(0, uploaded.places)
    at = part.change.indices[part.picked]
    everything = np.arange(at.size)
    lost = sum_picked(at, everything, before.cpu().numpy().view(values.dtype))
    read = after.cpu().numpy().view(values.dtype)
    gained = sum_picked(at, everything, read)
    return int(lost), int(gained), int(np.count_nonzero(read != values[part.picked]))


def _upload(
    change: StagedTensor, picked: NDArray[np.int64], places: NDArray[np.int64], live: torch.Tensor
) -> DevicePart:
    import torch

    signed = np.dtype(f"<i{change.values.itemsize}")
    return DevicePart(
        torch.from_numpy(places).to(live.device),
        torch.from_numpy(change.values[picked].view(signed)).to(live.device),
        torch.from_numpy(change.old_values[picked].view(signed)).to(live.device),
    )
