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

from weight_transfer.kernels.rectangles import exchange
from weight_transfer.receiver import StagedUpdate
from weight_transfer.tensors import Bits
from weight_transfer.vllm.flat import flat_bits
from weight_transfer.vllm.loader_map import LoaderMap

if TYPE_CHECKING:
    import torch


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
    device: DevicePart | None


@dataclass(frozen=True, slots=True)
class DevicePart:
    """The same on a parameter's device: uploaded before the pause begins."""

    places: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


def place(loader_map: LoaderMap, staged: StagedUpdate) -> tuple[Placed, ...]:
    """Find this rank's part of an update. Reads no weight: the engine may serve meanwhile."""
    found = []
    for change in staged.tensors:
        for rectangle in loader_map.rectangles(change.name):
            picked, places = rectangle.locate(change.indices)
            if not picked.size:
                continue
            old, new = change.old_values[picked], change.values[picked]
            live = loader_map.flat(rectangle.target)
            device = None if live.device.type == "cpu" else upload(places, old, new, live.device)
            found.append(Placed(change.name, rectangle.target, places, old, new, device))
    return tuple(found)


def write(loader_map: LoaderMap, placed: Sequence[Placed]) -> tuple[str, ...]:
    """Write the new values.

    Returns the parameters that are not proven: what was overwritten was not the old version, or
    what can be read there now is not the new one. When both hold for all of them, and the digests
    were right before, they are right now: the staged update's were checked against its manifest.
    """
    return tuple(
        part.parameter
        for part in placed
        if _exchange(loader_map, part, part.old, part.new) != (0, 0)
    )


def write_back(loader_map: LoaderMap, placed: Sequence[Placed]) -> None:
    """Write the old values; rerunning it is harmless."""
    for part in placed:
        _exchange(loader_map, part, part.new, part.old)


def _exchange(loader_map: LoaderMap, part: Placed, old: Bits, new: Bits) -> tuple[int, int]:
    """Returns (0 when all weights were `old`, 0 when all of them read as `new`)."""
    if part.device is not None:
        uploaded = part.device
        pair = (uploaded.old, uploaded.new) if new is part.new else (uploaded.new, uploaded.old)
        return _exchange_on_device(loader_map.flat(part.parameter), uploaded.places, *pair)
    flat = flat_bits(loader_map.parameter(part.parameter))
    # Unsigned places spare the kernel the question whether they count from the end.
    stale, wrong = exchange(flat, part.places.view(np.uint64), old, new)
    return stale, wrong


def _exchange_on_device(
    live: torch.Tensor, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor
) -> tuple[int, int]:
    """The same by torch, all of it on the device."""
    import torch

    with torch.inference_mode():
        stale = (live.index_select(0, places) != old).sum()
        live.index_copy_(0, places, new)
        wrong = (live.index_select(0, places) != new).sum()
    return int(stale), int(wrong)


def upload(places: NDArray[np.int64], old: Bits, new: Bits, device: torch.device) -> DevicePart:
    """Bring a part to a device."""
    import torch

    signed = np.dtype(f"<i{new.itemsize}")
    return DevicePart(
        torch.from_numpy(places).to(device),
        torch.from_numpy(old.view(signed)).to(device),
        torch.from_numpy(new.view(signed)).to(device),
    )
