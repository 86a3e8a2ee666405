"""A fresh dense load that is never in memory as a whole: it computes layer by layer.

outside   embeddings, last norm, head: loaded first and kept to the end
layer     loaded when the forward first comes to it; the next forward runs it, keeps what it
          computed and frees its weights
again     on a later forward, finished layers return their cached output
A forward that comes to a layer without weights ends there; the engine may serve in between.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from weight_transfer.engine.proof.reference import ReadTensor, layer_of, load_part

if TYPE_CHECKING:
    import torch

    from weight_transfer.engine.model import EngineModel
    from weight_transfer.engine.trace_loader import Trace


class _LayerWantedError(Exception):
    """A forward has come to a layer that has no weights yet."""

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self.layer = layer


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Checkpoint tensors of each layer, by the layer's name in the engine's model.

    `filled`: parameters and buffers that get their values from a checkpoint.
    """

    layers: Mapping[str, tuple[str, ...]]
    outside: tuple[str, ...]
    filled: frozenset[str]

    @classmethod
    def of(cls, trace: Trace, traced: torch.nn.Module, live: torch.nn.Module) -> LayerPlan | None:
        """Follow the trace of `traced`, which is on the meta device and otherwise like `live`.

        None where that cannot be taken apart: a loader that does more than copying, a tensor that
        fills two layers, a module with values that neither a checkpoint nor the live model has.
        """
        homes: dict[str, set[str]] = {}
        for rectangle in trace.rectangles:
            homes.setdefault(rectangle.source, set()).add(layer_of(rectangle.target))
        shared = any(len(layers_of) > 1 for layers_of in homes.values())
        filled = frozenset(rectangle.target for rectangle in trace.rectangles)
        if trace.transformed or shared or not _constants_known(traced, live, filled):
            return None
        layers: dict[str, list[str]] = {}
        for source, (home,) in homes.items():
            layers.setdefault(home, []).append(source)
        outside = tuple(layers.pop("", ()))
        return cls({home: tuple(names) for home, names in layers.items()}, outside, filled)


class LayeredModel:
    """An instance of the engine's model that has the weights of one layer at a time."""

    def __init__(
        self, engine: EngineModel, plan: LayerPlan, read: ReadTensor, keep: Iterable[str]
    ) -> None:
        """`keep`: names of parameters and buffers that are wanted once all has computed."""
        import torch

        self._engine, self._plan, self._read = engine, plan, read
        self._keep = frozenset(keep)
        self._live = {slot.name: slot.tensor for slot in slots_of(engine.model)}
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.model = engine.skeleton(torch.device("meta"))
        # By tensor, since one may be found by several names.
        self._filled = [s.tensor for s in slots_of(self.model) if s.name in plan.filled]
        self._filled_ids = frozenset(map(id, self._filled))
        self.kept: dict[str, torch.Tensor] = {}

    def pieces(self) -> Generator[None, None, torch.Tensor]:
        """Compute the probe's logits; yields between pieces."""
        with _hidden(self.model, self._plan.layers):
            self._load("", self._plan.outside)
        for name in self._plan.layers:
            self.model.get_submodule(name).forward = partial(_want, name)
        yield
        while True:
            try:
                return self._engine.prober.logits(self.model)
            except _LayerWantedError as error:
                wanted = error.layer
            yield
            self._load(wanted, self._plan.layers[wanted])
            layer = self.model.get_submodule(wanted)
            layer.forward = partial(_compute, layer)
            yield

    def _load(self, top: str, names: Iterable[str]) -> None:
        """Fill one layer, or all that is outside of them."""
        module = self.model.get_submodule(top)
        for slot in slots_of(module, top):
            if slot.tensor.is_meta:
                slot.holder[slot.key] = self._materialised(slot.name, slot.tensor)
        load_part(self._engine, self.model, module, ((n, self._read(n)) for n in names))
        tensors = {slot.name: slot.tensor for slot in slots_of(module, top)}
        self.kept |= {name: tensors[name].detach() for name in self._keep & tensors.keys()}
        # A layer shares no tensors with later ones.
        self._made.clear()

    def _materialised(self, name: str, meta: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor, with all that the engine's loader has noted on it.

        Zero where a checkpoint fills it; everything else is as in the live model.
        """
        import torch

        if id(meta) not in self._made:  # Tied ones come twice.
            shape = meta.shape, meta.stride()
            if id(meta) in self._filled_ids:
                memory = torch.empty_strided(*shape, dtype=meta.dtype, device=self._engine.device)
                memory.zero_()
            else:
                memory = self._live[name].detach().clone()
            memory.__class__ = meta.__class__
            memory.__dict__ = dict(meta.__dict__)
            self._made[id(meta)] = meta, memory
        return self._made[id(meta)][1]


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a module that holds a tensor: a parameter, a buffer or a plain attribute."""

    name: str
    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.holder[self.key]
        return tensor


def slots_of(module: torch.nn.Module, prefix: str = "") -> list[Slot]:
    """Return all places of tensors with elements in a module, by each of their names.

    Plain objects of a module, such as an attention's implementation, have places too.
    """
    import torch

    slots = []
    for path, part in module.named_modules(prefix=prefix, remove_duplicate=False):
        parts = [("", holder) for holder in (part._parameters, part._buffers, vars(part))]
        parts += [(f"{key}.", vars(value)) for key, value in vars(part).items() if _plain(value)]
        for inner, holder in parts:
            for key, value in holder.items():
                if isinstance(value, torch.Tensor) and value.numel():
                    name = f"{path}.{inner}{key}" if path else f"{inner}{key}"
                    slots.append(Slot(name, cast("dict[str, Any]", holder), key))
    return slots


def _plain(value: object) -> bool:
    """Return True for an object that may hold tensors and that PyTorch does not know."""
    import torch

    known = isinstance(value, (torch.Tensor, torch.nn.Module, type))
    return not known and not callable(value) and hasattr(value, "__dict__")


def _constants_known(
    traced: torch.nn.Module, live: torch.nn.Module, filled: frozenset[str]
) -> bool:
    """Return True if the live model has all values of `traced` that no checkpoint fills."""
    known = {slot.name: slot.tensor.shape for slot in slots_of(live)}
    return all(
        known.get(slot.name) == slot.tensor.shape
        for slot in slots_of(traced)
        if slot.tensor.is_meta and slot.name not in filled
    )


@contextmanager
def _hidden(model: torch.nn.Module, layers: Iterable[str]) -> Iterator[None]:
    """Have something else in each place of each layer."""
    import torch

    hidden = {model.get_submodule(name) for name in layers}
    homes = [(m, k) for m in model.modules() for k, part in m._modules.items() if part in hidden]
    real = [home._modules[key] for home, key in homes]
    try:
        for home, key in homes:
            home._modules[key] = torch.nn.Identity()
        yield
    finally:
        for (home, key), layer in zip(homes, real, strict=True):
            home._modules[key] = layer


def _want(name: str, *_: object, **__: object) -> None:
    """Stand for a layer that has no weights yet."""
    raise _LayerWantedError(name)


def _compute(layer: torch.nn.Module, *inputs: object, **more: object) -> Any:  # noqa: ANN401 -- a layer's own
    """Stand for a layer that has: compute once, then forget the weights."""
    output = type(layer).forward(layer, *inputs, **more)
    layer.forward = partial(_say, _copied(output))
    for members in (layer._modules, layer._parameters, layer._buffers):
        members.clear()
    return output


def _say(output: Any, *_: object, **__: object) -> Any:  # noqa: ANN401
    """Stand for a layer that has computed. Later layers may write into what they are given."""
    return _copied(output)


def _copied(output: Any) -> Any:  # noqa: ANN401
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, torch.Tensor.clone, output)
