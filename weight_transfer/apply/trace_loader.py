"""Tracer of a model's own `load_weights`: runs it without data and notes where each weight goes.

A loader slices, transposes, splits and reshapes checkpoint tensors and then copies them into
parameters. All of that reaches PyTorch's dispatcher as few view operations and one `copy_`. A view
is defined by (offset, shape, strides) alone, which a tensor on the meta device carries for free. So
each `TracedTensor`, a weight without data, holds one, views are taken of that, and `copy_` notes
both sides.

The result is rectangles: affine maps from positions of a checkpoint tensor to positions of an
engine's parameter. A parameter is seen as flat memory: from its first element to its last, gaps of
its strides included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weight_transfer.format.tensors import SIGNED, Bits, DeviceBits, TensorBits, unsigned
from weight_transfer.kernels.cpu import locate, sum_rectangle
from weight_transfer.kernels.processor import Int64s

_MAX_REPEATS = 4096
# Copies that keep elements and their order.
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of `tensor`, gaps of its strides included, as flat signed integers.

    They are as wide as the weights, writable, and on the tensor's device.
    """
    signed: torch.dtype = getattr(torch, SIGNED[tensor.element_size()])
    raw = tensor.detach()
    if raw.numel() == 0:
        return raw.view(-1).view(signed)
    strided = zip(raw.shape, raw.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in strided)
    return raw.as_strided((extent,), (1,)).view(signed)


def live_bits(tensor: torch.Tensor) -> Bits | DeviceBits:
    """Return the memory of `tensor` as writable bits, in host memory or on its device, gaps
    included."""
    return flat_bits(tensor) if tensor.device.type == "cpu" else DeviceBits(flat_view(tensor))


def flat_bits(tensor: torch.Tensor) -> Bits:
    """Return the memory of `tensor` as bits on the host, gaps of its strides included.

    It is the memory itself for a CPU tensor, a copy for one on a device.
    """
    bits: Bits = flat_view(tensor).cpu().numpy().view(unsigned(tensor.element_size()))
    return bits.view(np.ndarray)


class UnmappableError(Exception):
    """Error for two views that no rectangle relates: positions of the source overlap."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Affine map between positions of a checkpoint tensor and of an engine's parameter.

    Source offset + Σ at·source stride ↔ target offset + Σ at·target stride, for all `at` in
    `shape`. All counts are elements: of the flat checkpoint tensor `source`, and of the parameter
    `target` from its first element on. Source strides fall and nest, so each position has one `at`.
    """

    source: str
    target: str
    source_offset: int
    target_offset: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def source_key(self) -> tuple[int, ...]:
        """Key of the map's positions in the checkpoint tensor, the same on every rank."""
        return (self.source_offset, *self.shape, *self.source_strides)

    @property
    def bounds(self) -> tuple[int, int]:
        """First source position of the map, and the one after the last."""
        return self.source_offset, self.source_offset + 1 + _reach(self.shape, self.source_strides)

    def locate(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        """Return (positions in `indices`, places in the parameter) of the `indices` that the map
        contains.

        `indices`: flat source indices, ascending.
        """
        first, end = np.searchsorted(indices, self.bounds)
        if self.source_strides == (1,):
            shift = self.target_offset - self.source_offset
            if self.target_strides == (1,):
                return np.arange(first, end), indices[first:end] + shift
        picked, places = np.empty((2, end - first + 1), np.int64)
        count = locate(indices[first:end], *self._arrays(), picked, places)
        return picked[:count] + first, places[:count].copy()

    def digest_part(self, flat: Bits) -> int:
        """Return what the map's weights, read from the parameter `flat`, add to the source's
        digest."""
        return int(sum_rectangle(flat, *self._arrays()))

    def pieces(self, elements: int) -> Iterator[Rectangle]:
        """Yield the map cut along its first dimension into maps of about `elements` weights."""
        inner = max(1, self.elements // max(1, self.shape[0]))
        step = max(1, elements // inner)
        for at in range(0, self.shape[0], step):
            yield Rectangle(
                self.source,
                self.target,
                self.source_offset + at * self.source_strides[0],
                self.target_offset + at * self.target_strides[0],
                (min(step, self.shape[0] - at), *self.shape[1:]),
                self.source_strides,
                self.target_strides,
            )

    def _arrays(self) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        return (
            np.array((self.source_offset, self.target_offset), np.int64),
            np.array(self.shape, np.int64),
            np.array(self.source_strides, np.int64),
            np.array(self.target_strides, np.int64),
        )


def rectangles(
    names: tuple[str, str],
    offsets: tuple[int, int],
    shape: tuple[int, ...],
    source_strides: tuple[int, ...],
    target_strides: tuple[int, ...],
) -> list[Rectangle]:
    """Return the maps between two views of one shape, [] for empty ones.

    `names` and `offsets`: (source, target). A broadcast source gives one map for each repeat.
    Raises UnmappableError.
    """
    dims = [d for d in zip(shape, source_strides, target_strides, strict=True) if d[0] != 1]
    if any(n == 0 for n, _, _ in dims):
        return []
    repeats = [(n, t) for n, s, t in dims if s == 0]
    if math.prod(n for n, _ in repeats) > _MAX_REPEATS:
        raise UnmappableError(f"{names[0]} is repeated too often in {names[1]}")
    merged = _merged([d for d in dims if d[1] != 0])
    sizes, sources, targets = (tuple(d[k] for d in merged) for k in range(3))
    if any(s <= _reach(sizes[k + 1 :], sources[k + 1 :]) for k, s in enumerate(sources)):
        raise UnmappableError(f"parts of {names[0]} overlap")
    parts = []
    for at in itertools.product(*(range(n) for n, _ in repeats)):
        shift = sum(a * t for a, (_, t) in zip(at, repeats, strict=True))
        parts.append(Rectangle(*names, offsets[0], offsets[1] + shift, sizes, sources, targets))
    return parts


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return (size, source stride, target stride) of dimensions by falling source stride.

    Neighbours that are one run on both sides are merged.
    """
    joined: list[tuple[int, int, int]] = []
    for size, source, target in sorted(dims, key=lambda dim: -dim[1]):
        if joined and joined[-1][1:] == (source * size, target * size):
            joined[-1] = (joined[-1][0] * size, source, target)
        else:
            joined.append((size, source, target))
    return joined or [(1, 1, 1)]


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


class UntraceableError(Exception):
    """Error for a loader that computes with a weight: no map of positions describes it."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """View of a flat buffer: elements at offset + Σ position·stride, for all positions in
    `shape`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StridedView:
        """Return the view that `tensor` is of its storage."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


@dataclass(frozen=True, slots=True)
class Copy:
    """Record of one `copy_` by a loader: a view of a checkpoint tensor into a view of a storage."""

    source: str
    source_view: StridedView
    storage: int
    """Number of the target's storage, see `storage_id`."""
    target_view: StridedView
    cast: bool
    """True if source and target differ in type."""


class TracedTensor(torch.Tensor):
    """Checkpoint tensor without data, which records what a loader does with it.

    It looks like a CPU tensor of its shape; any use of its values raises UntraceableError. `tape`:
    list to which each copy by a loader is appended.
    """

    source: str
    tape: list[Copy]
    geometry: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[TracedTensor], source: str, tape: list[Copy], geometry: torch.Tensor
    ) -> TracedTensor:
        """Return a tensor without data that is a view of checkpoint tensor `source`.

        `geometry`: the same view of an equally large tensor on the meta device.
        """
        make: Any = torch.Tensor._make_wrapper_subclass
        traced: TracedTensor = make(
            cls,
            geometry.shape,
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=geometry.dtype,
            device="cpu",
        )
        traced.source, traced.tape, traced.geometry = source, tape, geometry
        return traced

    @classmethod
    def whole(
        cls, source: str, dtype: torch.dtype, shape: tuple[int, ...], tape: list[Copy]
    ) -> TracedTensor:
        return cls(source, tape, torch.empty(shape, dtype=dtype, device="meta"))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"TracedTensor({self.source}, {StridedView.of(self.geometry)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401 -- torch's OpOverload
        types: Any,  # noqa: ANN401 -- torch's own
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 -- what the operation returns
        """Record a copy, return a new TracedTensor for a view, and raise UntraceableError for
        the rest."""
        del types
        if func is torch.ops.aten.copy_.default:
            return _record(args[0], args[1])
        traced = args[0] if args else None
        others = (*args[1:], *(kwargs or {}).values())
        if not isinstance(traced, cls) or any(isinstance(other, cls) for other in others):
            raise UntraceableError(f"{func} combines weights")
        if func in _COPIES:
            if (kwargs or {}).get("dtype") not in (None, traced.dtype):
                raise UntraceableError(f"{func} converts {traced.source}")
            return cls(traced.source, traced.tape, traced.geometry)
        return _followed(func, traced, args[1:], kwargs or {})


def _followed(
    func: Any,  # noqa: ANN401 -- torch's OpOverload
    traced: TracedTensor,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> TracedTensor | list[TracedTensor]:
    """Return the view, or views, that the operation `func` takes.

    Raises UntraceableError for no view.
    """
    # as_strided reads memory as it lies, and that of a copy does not lie as its source's.
    if not func.is_view or func is torch.ops.aten.as_strided.default:
        raise UntraceableError(f"{func} computes with {traced.source}")
    try:
        viewed = func(traced.geometry, *args, **kwargs)
    except RuntimeError as error:
        # A view of a copy that compacted its source is none of the source.
        raise UntraceableError(f"{func} of {traced.source}: {error}") from error
    if not isinstance(viewed, torch.Tensor):
        return [TracedTensor(traced.source, traced.tape, part) for part in viewed]
    if viewed.dtype != traced.dtype:
        raise UntraceableError(f"{func} takes {traced.source} for another type")
    return TracedTensor(traced.source, traced.tape, viewed)


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that all views of one storage share, on the meta device too."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _record(target: torch.Tensor, traced: Any) -> torch.Tensor:  # noqa: ANN401 -- any operand
    if isinstance(target, TracedTensor) or not isinstance(traced, TracedTensor):
        raise UntraceableError("a loader writes into a checkpoint tensor")
    view = StridedView.of(traced.geometry.expand(target.shape))
    traced.tape.append(
        Copy(
            traced.source,
            view,
            storage_id(target),
            StridedView.of(target),
            cast=target.dtype != traced.dtype,
        )
    )
    return target


@dataclass(frozen=True, slots=True)
class Trace:
    """Record of what a model's loader does with a checkpoint.

    `rectangles`: where weights are copied to. `transformed`: checkpoint tensors that the loader
    computes with, and how; they have no rectangles. `casts`: those that it converts to another
    type, a part of the transformed ones. `shapes`: (shape, strides) of every parameter and buffer.
    """

    rectangles: tuple[Rectangle, ...]
    transformed: Mapping[str, str]
    casts: frozenset[str]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def trace_loader(skeleton: torch.nn.Module, base: Mapping[str, TensorBits]) -> Trace:
    """Return the trace of a model's own `load_weights`, run on tensors without data.

    `skeleton`: the model as it is before loading, best on the meta device, where it takes no
    memory.
    """
    targets = dict(_destinations(skeleton))
    homes = {storage_id(tensor): (name, tensor) for name, tensor in reversed(targets.items())}
    copies, refused = _run(skeleton, base)
    traced: list[Rectangle] = []
    casts = {copy.source for copy in copies if copy.cast}
    transformed = refused | dict.fromkeys(casts, "is converted to another type")
    for copy in copies:
        if copy.source in transformed:
            continue
        try:
            traced += _rectangles(copy, homes)
        except UnmappableError as error:
            transformed[copy.source] = str(error)
    return Trace(
        tuple(rect for rect in traced if rect.source not in transformed),
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
    """Return all copies by the loader, and for each tensor that cannot be traced the reason."""
    copies: list[Copy] = []
    try:
        _load(skeleton, base.values(), copies)
    except UntraceableError:
        # The loader computes with one of the tensors: load them one by one to find it.
        copies.clear()
    else:
        return copies, {}
    refused: dict[str, str] = {}
    for name, tensor in base.items():
        own: list[Copy] = []
        try:
            _load(skeleton, [tensor], own)
            copies += own
        except UntraceableError as error:
            refused[name] = str(error)
    return copies, refused


def _load(skeleton: torch.nn.Module, tensors: Iterable[TensorBits], tape: list[Copy]) -> None:
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
