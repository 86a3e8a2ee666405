"""Test-only faults: controls that must make the demo's checks fail. Inert without ROSE_FAULT."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum

import numpy as np

from weight_transfer.receiver import StagedTensor, StagedUpdate


class Fault(StrEnum):
    """What to break: claim a version without writing it, or write permuted values."""

    NONE = ""
    STALE_WEIGHTS = "stale_weights"
    WRONG_CHUNK = "wrong_chunk"


def injected() -> Fault:
    """Return the fault that this process was told to have; other parts' faults are none here."""
    name = os.environ.get("ROSE_FAULT", "")
    return Fault(name) if name in tuple(Fault) else Fault.NONE


def permuted(staged: StagedUpdate) -> StagedUpdate:
    """Return `staged` with the values of its most changed tensor rotated by one half."""
    if not staged.tensors:
        return staged
    largest = max(staged.tensors, key=lambda tensor: tensor.indices.size)
    return replace(staged, tensors=tuple(_rotated(t, largest) for t in staged.tensors))


def _rotated(tensor: StagedTensor, chosen: StagedTensor) -> StagedTensor:
    if tensor is not chosen:
        return tensor
    return replace(tensor, values=np.roll(tensor.values, tensor.values.size // 2))
