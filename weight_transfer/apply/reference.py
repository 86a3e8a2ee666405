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
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from weight_transfer.apply.receiver import StagedTensor, StagedUpdate
from weight_transfer.format.checkpoint import HEAD
from weight_transfer.format.tensors import TensorBits, bits_of, tensor_of

if TYPE_CHECKING:
    import torch

    from weight_transfer.apply.trace_loader import Trace

_T = TypeVar("_T")
_LAYER = re.compile(r"(.*?\.\d+)\.")


class Prober(Protocol):
    """Prober of an engine: it runs the fixed prompt through models that share the live KV cache.

    Use it only while the engine is paused or between its steps.
    """

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the probe's logits as `model` computes them now, a row for each compared token.

        Models of the same weights give the same bits.
        """
        ...


class ModelLoader(Protocol):
    """Loader that makes further instances of an engine's model, as the engine does at its start."""

    @property
    def device(self) -> torch.device:
        """Device on which the engine computes."""
        ...

    def skeleton(self, device: torch.device) -> torch.nn.Module:
        """Return a new instance of the engine's model on `device`, its weights not loaded."""
        ...

    def only_copies(self, skeleton: torch.nn.Module) -> None:
        """Make the loaders of an instance that is only traced leave out all but their copies.

        Some quantise a layer as soon as it is complete.
        """
        ...

    def loading(self) -> AbstractContextManager[Any]:
        """Return the context manager in which the engine's weight loaders have to run."""
        ...

    def process(self, module: torch.nn.Module) -> None:
        """Run the engine's post-processing of loaded weights on a module, in place."""
        ...


class LiveModel(ModelLoader, Protocol):
    """A live model, and the loader that makes models like it."""

    @property
    def model(self) -> torch.nn.Module:
        """Live model that the engine computes with."""
        ...


class EngineModel(LiveModel, Protocol):
    """A live model whose KV cache exists, and the prober for models like it."""

    @property
    def layerwise(self) -> bool:
        """True if each layer's output is the next one's only input.

        Such a model can compute with one layer's weights in memory at a time.
        """
        ...

    @property
    def prober(self) -> Prober:
        """Prober for models like the live one."""
        ...

    @property
    def drafts(self) -> LiveModel | None:
        """Model that drafts tokens, None where there is none with weights of the checkpoint."""
        ...


ReadTensor = Callable[[str], "torch.Tensor"]
"""Function that returns a checkpoint tensor by name, in memory of its own."""


def take_own(model: torch.nn.Module, *, head: bool) -> None:
    """Make the loader of an instance leave out tensors of other models in the checkpoint.

    head: it is of the head that drafts, whose tensors it takes by their names without `draft.`.
    """
    loader: Any = model
    load = loader.load_weights

    def own(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:  # noqa: ANN401 -- the engine's
        prefix = f"{HEAD}."
        found = ((n, t) for n, t in weights if n.startswith(prefix) is head)
        return load((n.removeprefix(prefix), t) for n, t in found)

    loader.load_weights = own


def load_in_pieces(
    loader: ModelLoader,
    names: Iterable[str],
    read: ReadTensor,
) -> Generator[None, None, torch.nn.Module]:
    """Build and load a new instance of the engine's model; a generator that returns the instance.

    It yields None between pieces of the work, so that the engine can serve in between. Classes,
    loader and post-processing are those of the engine's start.
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
    """Load `tensors` into `part` of `model` and post-process it.

    The rest of `model` has no memory.
    """
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
    """Build and load a new instance of the engine's model in one go, and return it."""
    return finish(load_in_pieces(loader, names, read))


def finish(pieces: Generator[None, None, _T]) -> _T:
    """Run a generator to its end, and return its return value."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: _T = end.value
            return result


def layers(names: Iterable[str]) -> list[list[str]]:
    """Return the names grouped by decoder layer, in order.

    One group is loaded in one go, since parts of a fused module cannot be loaded apart.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of(name), []).append(name)
    return list(groups.values())


def layer_of(name: str) -> str:
    """Return the decoder layer in a parameter's name, such as `model.layers.3`, "" for none."""
    layer = _LAYER.match(name)
    return layer.group(1) if layer else ""


@dataclass(frozen=True, slots=True)
class Reference:
    """Result of a fresh load of one version: its probe logits, and by name its loose parameters and
    the modules that have packed theirs away."""

    logits: torch.Tensor
    loose: Mapping[str, torch.Tensor]
    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)


def reference_in_pieces(
    engine: EngineModel,
    tensors: Mapping[str, TensorBits],
    staged: StagedUpdate | None,
    loose: tuple[str, ...],
    plan: LayerPlan | None,
    packed: tuple[str, ...] = (),
) -> Generator[None, None, Reference]:
    """Load `tensors` with the changes of `staged` and run the probe.

    A generator that returns a Reference. It yields None between pieces of the work. With a `plan`
    one layer is in memory at a time, without one the whole model.
    """

    read = overlay(tensors, staged.tensors if staged else ())
    if plan is not None:
        layered = LayeredModel(engine, plan, read, loose)
        logits = yield from layered.pieces()
        return Reference(logits, layered.kept)
    model = yield from load_in_pieces(engine, tensors, read)
    yield
    logits = engine.prober.logits(model)
    known = dict(model.named_parameters()) | dict(model.named_buffers())
    modules = {name: model.get_submodule(name) for name in packed}
    return Reference(logits, {name: known[name].detach() for name in loose}, modules)


def overlay(tensors: Mapping[str, TensorBits], staged: Iterable[StagedTensor] = ()) -> ReadTensor:
    """Return a function that reads a tensor by name with the changes of `staged` made.

    Each call makes a new torch tensor; `tensors` stay what they are.
    """
    changed = {each.name: each.change for each in staged}

    def read(name: str) -> torch.Tensor:
        tensor = tensor_of(tensors[name])
        if name in changed:
            change = changed[name]
            bits_of(tensor)[change.indices] = change.new
        return tensor

    return read


class _LayerWantedError(Exception):
    """Signal that a forward has come to a layer whose weights are not loaded yet."""

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self.layer = layer


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Plan to compute with one layer's weights at a time: checkpoint tensors by layer.

    `outside`: checkpoint tensors of no layer. `filled`: parameters and buffers that get their
    values from a checkpoint.
    """

    layers: Mapping[str, tuple[str, ...]]
    outside: tuple[str, ...]
    filled: frozenset[str]

    @classmethod
    def of(cls, trace: Trace, traced: torch.nn.Module, live: torch.nn.Module) -> LayerPlan | None:
        """Return the plan by the loader's trace of `traced`, a copy of `live` on the meta device.

        Return None where the model cannot be taken apart: its loader does more than copying, a
        tensor fills two layers, or a module has values that neither a checkpoint nor the live model
        has.
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
    """Instance of the engine's model that has the weights of one layer in memory at a time."""

    def __init__(
        self, engine: EngineModel, plan: LayerPlan, read: ReadTensor, keep: Iterable[str]
    ) -> None:
        """Build the model without memory.

        `keep`: parameters and buffers whose values go to `kept`.
        """
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
        """Compute the probe's logits.

        A generator that yields None between pieces and returns the logits.
        """
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
        """Load the weights of layer `top`, or with "" all that is outside of layers."""
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
        """Return memory on the device for a meta tensor, with the attributes that the loader set on
        it.

        It is zero where a checkpoint fills it, else a copy of the live model's tensor.
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
    """Place in a module that holds a tensor: a parameter, a buffer or a plain attribute."""

    name: str
    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.holder[self.key]
        return tensor


def slots_of(module: torch.nn.Module, prefix: str = "") -> list[Slot]:
    """Return all places of non-empty tensors in a module, one for each of their names.

    Attributes of plain objects in a module, such as an attention's implementation, are included.
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
    """Return True for an object that may hold tensors but is not PyTorch's, a class or callable."""
    import torch

    known = isinstance(value, (torch.Tensor, torch.nn.Module, type))
    return not known and not callable(value) and hasattr(value, "__dict__")


def _constants_known(
    traced: torch.nn.Module, live: torch.nn.Module, filled: frozenset[str]
) -> bool:
    """Return True if the live model has all tensors of `traced` that no checkpoint fills."""
    known = {slot.name: slot.tensor.shape for slot in slots_of(live)}
    return all(
        known.get(slot.name) == slot.tensor.shape
        for slot in slots_of(traced)
        if slot.tensor.is_meta and slot.name not in filled
    )


@contextmanager
def _hidden(model: torch.nn.Module, layers: Iterable[str]) -> Iterator[None]:
    """Replace the layers of the model by Identity modules within the block."""
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
    """Raise the signal that layer `name` needs its weights, in place of the layer's forward."""
    raise _LayerWantedError(name)


def _compute(layer: torch.nn.Module, *inputs: object, **more: object) -> Any:  # noqa: ANN401 -- a layer's own
    """Return a layer's output, cache it for later forwards and free the layer's weights."""
    output = type(layer).forward(layer, *inputs, **more)
    layer.forward = partial(_say, _copied(output))
    for members in (layer._modules, layer._parameters, layer._buffers):
        members.clear()
    return output


def _say(output: Any, *_: object, **__: object) -> Any:  # noqa: ANN401
    """Return a copy of a layer's cached output, since later layers may write into their input."""
    return _copied(output)


def _copied(output: Any) -> Any:  # noqa: ANN401
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, torch.Tensor.clone, output)
