"""Applier: O(changed) scatter of staged absolute values into live parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from weight_transfer.digest import digest_of
from weight_transfer.receiver import StagedTensor, StagedUpdate
from weight_transfer.tensors import Bits, bits_of
from weight_transfer.vllm.loader_map import LoaderMap

if TYPE_CHECKING:
    import torch


def apply_update(loader_map: LoaderMap, staged: StagedUpdate) -> None:
    """Overwrite the changed live weights with the new values; rerunning it is harmless."""
    for tensor in staged.tensors:
        overwrite(loader_map.view(tensor.name), tensor, tensor.values)


def revert_update(loader_map: LoaderMap, staged: StagedUpdate) -> None:
    """Overwrite the changed live weights with the old values."""
    for tensor in staged.tensors:
        overwrite(loader_map.view(tensor.name), tensor, tensor.old_values)


def overwrite(live: torch.Tensor, tensor: StagedTensor, values: Bits) -> None:
    """Write `values` at `tensor.indices` of the flat `live` weights, bits as they are."""
    import torch

    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[live.element_size()]
    source = torch.from_numpy(values.view(np.dtype(f"<i{values.itemsize}")))
    indices = torch.from_numpy(tensor.indices)
    with torch.inference_mode():
        live.view(signed).index_copy_(0, indices.to(live.device), source.to(live.device))


def live_digests(loader_map: LoaderMap, names: Iterable[str]) -> dict[str, int]:
    """Return the digest of each checkpoint tensor as read back from the live parameters."""
    return {name: digest_of(bits_of(loader_map.view(name))) for name in names}
