"""Tracer of a model's own `load_weights`: runs it without data and notes where each weight goes.

A loader slices, transposes, splits and reshapes checkpoint tensors and then copies them into
parameters. All of that reaches PyTorch's dispatcher as few view operations and one `copy_`. A view
is defined by (offset, shape, strides) alone, which a tensor on the meta device carries for free. So
each `TracedTensor`, a weight without data, holds one, views are taken of that, and `copy_` notes
both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weight_transfer.engine.rectangle import Rectangle, UnmappableError, rectangles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weight_transfer.format.tensors import TensorBits


# Elements stay what they are, and in the order of their positions.
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


class UntraceableError(Exception):
    """A loader computes with a weight: no map of positions describes what it does."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a flat buffer: at offset + Σ position·stride for each position in `shape`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Return the view of its storage that `tensor` is."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


@dataclass(frozen=True, slots=True)
class Copy:
    """One `copy_` by a loader: a view of a checkpoint tensor into a view of some storage."""

    source: str
    source_view: View
    storage: int
    """Identity of the storage, see `storage_id`."""
    target_view: View
    cast: bool
    """True if source and target differ in type."""


@dataclass(slots=True)
class Tape:
    """Record of the copies by loaders, in order."""

    copies: list[Copy] = field(default_factory=list)


class TracedTensor(torch.Tensor):
    """Looks like a CPU tensor of its shape; any use of its values raises UntraceableError."""

    source: str
    tape: Tape
    geometry: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[TracedTensor], source: str, tape: Tape, geometry: torch.Tensor
    ) -> TracedTensor:
        """`geometry` is on the meta device, a view of as many elements as the whole tensor has."""
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
        cls, source: str, dtype: torch.dtype, shape: tuple[int, ...], tape: Tape
    ) -> TracedTensor:
        return cls(source, tape, torch.empty(shape, dtype=dtype, device="meta"))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"TracedTensor({self.source}, {View.of(self.geometry)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401 -- torch's OpOverload
        types: Any,  # noqa: ANN401 -- torch's own
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 -- what the operation returns
        """Record a copy, follow a view, refuse all else."""
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
    """The view that `func` takes. Raises UntraceableError for what is none."""
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
    """Return the identity that all views of one storage share, on the meta device too."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _record(target: torch.Tensor, traced: Any) -> torch.Tensor:  # noqa: ANN401 -- any operand
    if isinstance(target, TracedTensor) or not isinstance(traced, TracedTensor):
        raise UntraceableError("a loader writes into a checkpoint tensor")
    view = View.of(traced.geometry.expand(target.shape))
    traced.tape.copies.append(
        Copy(
            traced.source,
            view,
            storage_id(target),
            View.of(target),
            cast=target.dtype != traced.dtype,
        )
    )
    return target


@dataclass(frozen=True, slots=True)
class Trace:
    """Record of what a loader does with a checkpoint.

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
