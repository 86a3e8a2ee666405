"""Reference of a version: its probe logits and opaque parameters by a fresh dense load.

The engine's own loader runs anew on the version's checkpoint tensors, so the reference depends on
none of the code that updates weights in place. It is made before the engine's pause, layer by
layer, so that the engine can serve between the pieces.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from weight_transfer.format.tensors import TensorBits, bits_of, tensor_of
from weight_transfer.receiver import StagedTensor, StagedUpdate

if TYPE_CHECKING:
    import torch

    from weight_transfer.vllm.proof.layerwise_load import LayerPlan
    from weight_transfer.vllm.worker import EngineModel


_T = TypeVar("_T")
_LAYER = re.compile(r"(.*?\.\d+)\.")
ReadTensor = Callable[[str], "torch.Tensor"]
"""Gives a checkpoint tensor by name, with memory of its own."""


def skeleton(vllm_config: Any, device: torch.device) -> torch.nn.Module:  # noqa: ANN401 -- vLLM's
    """Build a second instance of the engine's model, its weights not loaded.

    It registers its layers in a context of its own: the live model's stay the registered ones.
    """
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    model_config = config.model_config
    with set_default_torch_dtype(model_config.dtype), device:
        model: torch.nn.Module = initialize_model(vllm_config=config, model_config=model_config)
    return model


def load_in_pieces(
    vllm_config: Any,  # noqa: ANN401 -- an engine type that is not ours to check
    device: torch.device,
    names: Iterable[str],
    read: ReadTensor,
) -> Generator[None, None, torch.nn.Module]:
    """Build and load an instance; yields between pieces and returns it, ready to compute.

    Same classes, same loader and the same processing after loading as at engine start.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = skeleton(vllm_config, device)
    load: Any = model.load_weights
    yield
    for group in layers(names):
        with set_current_vllm_config(vllm_config):
            load((name, read(name)) for name in group)
        yield
    with set_current_vllm_config(vllm_config):
        process_weights_after_loading(model, vllm_config.model_config, device)
    return model.eval()


def load_part(
    vllm_config: Any,  # noqa: ANN401 -- an engine type that is not ours to check
    device: torch.device,
    model: torch.nn.Module,
    part: torch.nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Load a part of `model` that has memory, the rest being on the meta device."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    load: Any = model.load_weights
    with set_current_vllm_config(vllm_config):
        load(tensors)
        process_weights_after_loading(part, vllm_config.model_config, device)
    part.eval()


def load_fresh(
    vllm_config: Any,  # noqa: ANN401 -- an engine type that is not ours to check
    device: torch.device,
    names: Iterable[str],
    read: ReadTensor,
) -> torch.nn.Module:
    """The same at once."""
    return finish(load_in_pieces(vllm_config, device, names, read))


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
    from weight_transfer.vllm.proof.layerwise_load import LayeredModel

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
