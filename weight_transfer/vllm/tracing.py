"""Tracing: run a model's own `load_weights` without data and note where each weight goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weight_transfer.vllm.rectangle import Rectangle, UnmappableError, rectangles
from weight_transfer.vllm.traced import Copy, Tape, TracedTensor, UntraceableError, storage_id

if TYPE_CHECKING:
    from weight_transfer.tensors import TensorBits


@dataclass(frozen=True, slots=True)
class Trace:
    """What a loader does with a checkpoint.

    `transformed`: checkpoint tensors that it computes with, and how; no rectangle is complete for
    them. `casts`: those that it converts to another type, a part of the transformed ones.
    `shapes`: of every parameter, (shape, strides).
    """

    rectangles: tuple[Rectangle, ...]
    transformed: Mapping[str, str]
    casts: frozenset[str]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def trace_loader(skeleton: torch.nn.Module, base: Mapping[str, TensorBits]) -> Trace:
    """Trace the loader of `skeleton`, a model as it is before loading, best on the meta device.

    Takes no memory to speak of: neither side has data.
    """
    targets = dict(_destinations(skeleton))
    homes = {storage_id(tensor): (name, tensor) for name, tensor in reversed(targets.items())}
    copies, refused = _run(skeleton, base)
    found: list[Rectangle] = []
    casts = {copy.source for copy in copies if copy.cast}
    transformed = refused | dict.fromkeys(casts, "is converted to another type")
    for copy in copies:
        if copy.source in transformed:
            continue
        try:
            found += _rectangles(copy, homes)
        except UnmappableError as error:
            transformed[copy.source] = str(error)
    return Trace(
        tuple(rect for rect in found if rect.source not in transformed),
        transformed,
        frozenset(casts),
        {name: (tuple(t.shape), tuple(t.stride())) for name, t in targets.items()},
    )


def _destinations(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _run(
    skeleton: torch.nn.Module, base: Mapping[str, TensorBits]
) -> tuple[list[Copy], dict[str, str]]:
    """All copies, and why some tensors cannot be traced."""
    tape = Tape()
    try:
        _load(skeleton, base.values(), tape)
    except UntraceableError:
        # One of them is computed with; the others can be told apart one by one.
        return _run_singly(skeleton, base)
    return tape.copies, {}


def _run_singly(
    skeleton: torch.nn.Module, base: Mapping[str, TensorBits]
) -> tuple[list[Copy], dict[str, str]]:
    copies: list[Copy] = []
    refused: dict[str, str] = {}
    for name, tensor in base.items():
        tape = Tape()
        try:
            _load(skeleton, [tensor], tape)
            copies += tape.copies
        except UntraceableError as error:
            refused[name] = str(error)
    return copies, refused


def _load(skeleton: torch.nn.Module, tensors: Iterable[TensorBits], tape: Tape) -> None:
    load: Any = skeleton.load_weights
    with torch.no_grad():
        load(
            (t.name, TracedTensor.whole(t.name, getattr(torch, t.dtype), t.shape, tape))
            for t in tensors
        )


def _rectangles(copy: Copy, homes: Mapping[int, tuple[str, torch.Tensor]]) -> list[Rectangle]:
    home = homes.get(copy.storage)
    if home is None:
        raise UnmappableError("goes through a buffer of the loader's own")
    name, tensor = home
    source, target = copy.source_view, copy.target_view
    offsets = (source.offset, target.offset - int(tensor.storage_offset()))
    return rectangles((copy.source, name), offsets, source.shape, source.strides, target.strides)
