"""Reference of a version: its probe logits and opaque parameters by a fresh dense load.

The engine's own loader runs anew on the version's checkpoint tensors, so the reference depends on
none of the code that updates weights in place. It is made before the engine's pause, so that the
engine can serve between the pieces; and layer by layer, never in memory as a whole, where the model
can be taken apart:

outside   embeddings, last norm, head: loaded first and kept to the end
layer     loaded when the forward first comes to it; the next forward runs it, keeps what it
          computed and frees its weights
again     on a later forward, finished layers return their cached output
A forward that comes to a layer without weights ends there; the engine may serve in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from weight_transfer.apply.receiver import StagedTensor, StagedUpdate
from weight_transfer.format.tensors import TensorBits, bits_of, tensor_of

if TYPE_CHECKING:
    import torch

    from weight_transfer.apply.trace_loader import Trace

_T = TypeVar("_T")
_LAYER = re.compile(r"(.*?\.\d+)\.")


class Prober(Protocol):
    """Runs the probe prompt through models that share the live engine's KV cache.

    Only to be used while the engine is paused or between its steps.
    """

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the probe's logits as `model` computes them now, a row for each that is compared.

        Models of the same weights give the same bits.
        """
        ...


class ModelLoader(Protocol):
    """Makes instances of an engine's model as the engine does at its start."""

    @property
    def device(self) -> torch.device:
        """Device on which the engine computes."""
        ...

    def skeleton(self, device: torch.device) -> torch.nn.Module:
        """Build a second instance of the engine's model, its weights not loaded."""
        ...

    def loading(self) -> AbstractContextManager[Any]:
        """Return the context in which the engine's loaders and their processing run."""
        ...

    def process(self, module: torch.nn.Module) -> None:
        """Do what the engine does once weights are loaded."""
        ...


class EngineModel(ModelLoader, Protocol):
    """A live model, whose KV cache exists, and the probe for models like it."""

    @property
    def layerwise(self) -> bool:
        """True if each layer's output is the next one's only input.

        Such a model can compute with one layer's weights in memory at a time.
        """
        ...

    @property
    def model(self) -> torch.nn.Module:
        """The one that the engine computes with."""
        ...

    @property
    def prober(self) -> Prober:
        """The probe for models like it."""
        ...


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
