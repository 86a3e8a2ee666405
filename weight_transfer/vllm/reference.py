"""Reference: what a version computes, and what its loader makes of it, known before the pause."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weight_transfer.receiver import StagedTensor, StagedUpdate
from weight_transfer.tensors import TensorBits, bits_of, tensor_of
from weight_transfer.vllm.fresh import ReadTensor

if TYPE_CHECKING:
    import torch

    from weight_transfer.vllm.engine import EngineModel
    from weight_transfer.vllm.layered import LayerPlan


@dataclass(frozen=True, slots=True)
class Reference:
    """Of one version: the probe's logits by a fresh dense load, and its loose parameters."""

    logits: torch.Tensor
    loose: Mapping[str, torch.Tensor]


def reference_in_pieces(
    engine: EngineModel,
    tensors: Mapping[str, TensorBits],
    staged: StagedUpdate | None,
    loose: tuple[str, ...],
    plan: LayerPlan | None,
) -> Generator[None, None, Reference]:
    """Load `tensors` with `staged` on top, run the probe; yields between pieces.

    With a `plan` one layer is in memory at a time, without one the whole model.
    """
    from weight_transfer.vllm.fresh import load_in_pieces
    from weight_transfer.vllm.layered import LayeredModel

    read = overlay(tensors, {t.name: t for t in staged.tensors} if staged else {})
    if plan is not None:
        layered = LayeredModel(engine, plan, read, loose)
        logits = yield from layered.pieces()
        return Reference(logits, layered.kept)
    model = yield from load_in_pieces(engine.vllm_config, engine.device, tensors, read)
    yield
    logits = engine.prober.logits(model)
    known = dict(model.named_parameters()) | dict(model.named_buffers())
    return Reference(logits, {name: known[name].detach() for name in loose})


def overlay(tensors: Mapping[str, TensorBits], changes: Mapping[str, StagedTensor]) -> ReadTensor:
    """Read `tensors` as they are once `changes` are made; `tensors` stay what they are."""

    def read(name: str) -> torch.Tensor:
        tensor = tensor_of(tensors[name])
        change = changes.get(name)
        if change is not None:
            bits_of(tensor)[change.indices] = change.values
        return tensor

    return read
