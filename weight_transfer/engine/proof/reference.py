"""Reference of a version: its probe logits and opaque parameters by a fresh dense load.

The engine's own loader runs anew on the version's checkpoint tensors, so the reference depends on
none of the code that updates weights in place. It is made before the engine's pause, layer by
layer, so that the engine can serve between the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from weight_transfer.format.tensors import TensorBits, bits_of, tensor_of
from weight_transfer.receiver import StagedTensor, StagedUpdate

if TYPE_CHECKING:
    import torch

    from weight_transfer.engine.model import EngineModel, ModelLoader
    from weight_transfer.engine.proof.layerwise_load import LayerPlan


_T = TypeVar("_T")
_LAYER = re.compile(r"(.*?\.\d+)\.")
ReadTensor = Callable[[str], "torch.Tensor"]
"""Gives a checkpoint tensor by name, with memory of its own."""


def load_in_pieces(
    loader: ModelLoader,
    names: Iterable[str],
    read: ReadTensor,
) -> Generator[None, None, torch.nn.Module]:
    """Build and load an instance; yields between pieces and returns it, ready to compute.

    Same classes, same loader and the same processing after loading as at engine start.
    """
    model = loader.skeleton(loader.device)
    load: Any = model.load_weights
    yield
    for group in layers(names):
        with loader.loading():
            load((name, read(name)) for name in group)
        yield
    with loader.loading():
        loader.process(model)
    return model.eval()


def load_part(
    loader: ModelLoader,
    model: torch.nn.Module,
    part: torch.nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Load a part of `model` that has memory, the rest being on the meta device."""
    load: Any = model.load_weights
    with loader.loading():
        load(tensors)
        loader.process(part)
    part.eval()


def load_fresh(
    loader: ModelLoader,
    names: Iterable[str],
    read: ReadTensor,
) -> torch.nn.Module:
    """The same at once."""
    return finish(load_in_pieces(loader, names, read))


def finish(pieces: Generator[None, None, _T]) -> _T:
    """Run a generator to its end and return what it returns."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: _T = end.value
            return result


def layers(names: Iterable[str]) -> list[list[str]]:
    """Cut names by decoder layer: a fused module's parts have to be loaded in one go."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of(name), []).append(name)
    return list(groups.values())


def layer_of(name: str) -> str:
    """The decoder layer that a name belongs to, empty when to none."""
    layer = _LAYER.match(name)
    return layer.group(1) if layer else ""


@dataclass(frozen=True, slots=True)
class Reference:
    """Probe logits of a fresh dense load of one version, and its loose parameters."""

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
    from weight_transfer.engine.proof.layerwise_load import LayeredModel

    read = overlay(tensors, {t.name: t for t in staged.tensors} if staged else {})
    if plan is not None:
        layered = LayeredModel(engine, plan, read, loose)
        logits = yield from layered.pieces()
        return Reference(logits, layered.kept)
    model = yield from load_in_pieces(engine, tensors, read)
    yield
    logits = engine.prober.logits(model)
    known = dict(model.named_parameters()) | dict(model.named_buffers())
    return Reference(logits, {name: known[name].detach() for name in loose})


def overlay(tensors: Mapping[str, TensorBits], staged: Mapping[str, StagedTensor]) -> ReadTensor:
    """Read `tensors` with the changes of `staged`; `tensors` stay what they are."""

    def read(name: str) -> torch.Tensor:
        tensor = tensor_of(tensors[name])
        if name in staged:
            change = staged[name].change
            bits_of(tensor)[change.indices] = change.new
        return tensor

    return read
