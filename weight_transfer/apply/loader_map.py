"""Loader map: where each checkpoint weight lives in this rank's parameters, proved at start.

trace    the model's own loader, without data: rectangles (see `trace_loader`)
prove    replay the base through them; every byte of every parameter must be what the engine
         really loaded
loose    parameters that differ: their loader transforms weights. They must equal, byte for byte,
         those of a second, fresh load of the base, and every update copies them from one
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from weight_transfer.apply.trace_loader import Rectangle, Trace, flat_bits, flat_view, live_bits
from weight_transfer.errors import LoaderMapError
from weight_transfer.format.tensors import WIDTHS, Bits, TensorBits, bits_of

if TYPE_CHECKING:
    import torch

    from weight_transfer.format.tensors import Flat

FreshLoad = Callable[[], "torch.nn.Module"]
"""Function that returns a second instance of the engine's model, loaded with the base."""


DRAFTS = "drafts."


class LoaderMap:
    """Map of checkpoint weights to their places in a live model's parameters on one rank,
    proved."""

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        rectangles: Sequence[Rectangle],
        loose: Sequence[str],
        transformed: Mapping[str, str],
        packed: Sequence[str] = (),
    ) -> None:
        self._live = live
        self._rectangles: dict[str, list[Rectangle]] = defaultdict(list)
        for rectangle in rectangles:
            self._rectangles[rectangle.source].append(rectangle)
        self.loose = tuple(loose)
        """Names of parameters that updates copy as a whole from a fresh load."""
        self.packed = tuple(packed)
        """Names of modules that keep weights where no parameter shows them: updates replace them by
        those of a fresh load."""
        self.transformed = transformed
        """Checkpoint tensors that no map describes, and the reason."""

    @classmethod
    def prove(
        cls,
        model: torch.nn.Module,
        trace: Trace,
        base: Mapping[str, TensorBits],
        fresh: FreshLoad,
        own: Collection[str] | None = None,
    ) -> LoaderMap:
        """Return the map of `base`, the checkpoint that `model` was loaded from, after a byte for
        byte check.

        `fresh` returns a second load of the base, and is called only when a parameter is loose.
        `own`: names of tensors that are mapped, all without it.
        Raises LoaderMapError that names the first parameter that is neither what the map says nor
        what a fresh load gives.
        """
        _refuse_casts(model, trace, base)
        packed = _packed(model, trace)
        live = {n: t for n, t in live_tensors(model, trace).items() if _module(n) not in packed}
        if own is not None:
            live = {name: live[name] for name in own if name in live}
        by_target: dict[str, list[Rectangle]] = defaultdict(list)
        for rectangle in trace.rectangles:
            by_target[rectangle.target].append(rectangle)
        loose = [
            name
            for name, tensor in live.items()
            if not _replays(tensor, name, trace, by_target[name], base)
        ]
        if loose:
            _prove_loose(live, loose, live_tensors(fresh(), trace))
        transformed = dict(trace.transformed)
        for rectangle in trace.rectangles:
            if rectangle.target in loose or _module(rectangle.target) in packed:
                transformed.setdefault(rectangle.source, f"{rectangle.target} is processed further")
        kept = [r for r in trace.rectangles if r.target in live and r.target not in loose]
        return cls(live, kept, loose, transformed, packed)

    def lacking(self, model: torch.nn.Module, trace: Trace) -> tuple[str, ...]:
        """Return the names of another model's tensors whose memory is none of this one's."""
        mapped = set(map(_memory, self._live.values()))
        found = live_tensors(model, trace).items()
        return tuple(name for name, tensor in found if _memory(tensor) not in mapped)

    def with_drafts(self, drafts: LoaderMap) -> LoaderMap:
        """Return the map with that of a drafting model, whose names begin with `drafts.`."""
        mapped = [each for rectangles in self._rectangles.values() for each in rectangles]
        mapped += [
            replace(each, target=DRAFTS + each.target)
            for rectangles in drafts._rectangles.values()
            for each in rectangles
        ]
        live = {DRAFTS + name: tensor for name, tensor in drafts._live.items()}
        loose = [DRAFTS + name for name in drafts.loose]
        transformed = {**drafts.transformed, **self.transformed}
        return LoaderMap(
            {**self._live, **live}, mapped, [*self.loose, *loose], transformed, self.packed
        )

    def rectangles(self, name: str) -> Sequence[Rectangle]:
        """Return the maps of a checkpoint tensor into this rank's parameters, perhaps none."""
        return self._rectangles.get(name, ())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors that have a place on this rank."""
        return tuple(self._rectangles)

    @property
    def filled(self) -> tuple[str, ...]:
        """Names of non-empty parameters and buffers whose values come from a checkpoint."""
        import torch

        mapped = {r.target for rectangles in self._rectangles.values() for r in rectangles}
        return tuple(
            name
            for name, tensor in self._live.items()
            if tensor.numel() and (name in mapped or isinstance(tensor, torch.nn.Parameter))
        )

    def parameter(self, name: str) -> torch.Tensor:
        return self._live[name]

    def flat(self, name: str) -> torch.Tensor:
        """Return a live parameter's memory from its first element on, as flat writable integers."""
        return flat_view(self._live[name])

    def bits(self, name: str) -> Flat:
        """Return a live parameter's memory as writable bits, in host memory or on its device."""
        return live_bits(self.parameter(name))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _packed(model: torch.nn.Module, trace: Trace) -> tuple[str, ...]:
    """Return the modules on a CPU that have no such parameter any more as the loader fills.

    On a GPU a kernel's memory stays where CUDA graphs know it: a parameter that is gone there went
    into another one.
    """
    known: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if any(parameter.device.type != "cpu" for parameter in known.values()):
        return ()
    known |= dict(model.named_buffers(remove_duplicate=False))
    gone = (each.target for each in trace.rectangles if each.target not in known)
    return tuple(dict.fromkeys(map(_module, gone)))


def live_tensors(model: torch.nn.Module, trace: Trace) -> dict[str, torch.Tensor]:
    """Return all tensors of `model` that a checkpoint may fill, by name; tied ones once.

    These are all parameters, and the buffers that the trace shows to be filled, or cannot rule out.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    filled = {rectangle.target for rectangle in trace.rectangles}
    persistent = set(model.state_dict()) if trace.transformed else set()
    for name, buffer in model.named_buffers():
        if (name in filled or name in persistent) and buffer.numel():
            tensors[name] = buffer
    return _once(tensors)


def _once(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors without those whose memory has another name already (tied weights)."""
    seen: set[tuple[object, ...]] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        memory = _memory(tensor)
        if tensor.numel() == 0 or memory not in seen:
            kept[name] = tensor
            seen.add(memory)
    return kept


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _refuse_casts(model: torch.nn.Module, trace: Trace, base: Mapping[str, TensorBits]) -> None:
    """Raise LoaderMapError if the engine serves more than half of the weights in another type.

    Every update would then load the whole engine anew.
    """
    total = sum(tensor.bits.size for tensor in base.values())
    if 2 * sum(base[name].bits.size for name in trace.casts) <= total:
        return
    name = next(iter(trace.casts))
    served = next(parameter.dtype for parameter in model.parameters())
    raise LoaderMapError(
        f"{name} is {base[name].dtype} in the checkpoint and {served} in the engine; "
        f"start it with --dtype {base[name].dtype}"
    )


def _replays(
    live: torch.Tensor,
    name: str,
    trace: Trace,
    rectangles: Sequence[Rectangle],
    base: Mapping[str, TensorBits],
) -> bool:
    """Return True if the base, copied through the rectangles, gives every byte of `live`.

    With each tensor of the checkpoint traced, what no rectangle reaches is padding and not
    compared. Otherwise it has to be zero.
    """
    if trace.shapes.get(name) != (tuple(live.shape), tuple(live.stride())) or not rectangles:
        return False
    if any(WIDTHS[base[rect.source].dtype] != live.element_size() for rect in rectangles):
        return False
    real = flat_bits(live)
    replayed = np.zeros_like(real) if trace.transformed else real.copy()
    for rect in rectangles:
        view(replayed, rect.target_offset, rect.shape, rect.target_strides)[...] = view(
            base[rect.source].bits, rect.source_offset, rect.shape, rect.source_strides
        )
    return np.array_equal(replayed, real)


def view(flat: Bits, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Bits:
    """Return the view of `flat` at offset + Σ position·stride, for all positions in `shape`."""
    steps = [stride * flat.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, steps)


def _prove_loose(
    live: Mapping[str, torch.Tensor],
    loose: Sequence[str],
    fresh: Mapping[str, torch.Tensor],
) -> None:
    for name in loose:
        if live[name].numel() == 0:
            raise LoaderMapError(
                f"{name} is empty: the engine packed its weights away; start it with "
                "VLLM_PLUGINS=rose_unpacked and ROSE_ROLE=guest or dedicated, latent attention on"
                " a CPU also with --attention-backend=CPU_MLA"
            )
        second = fresh.get(name)
        if second is None or not _same(live[name], second):
            raise LoaderMapError(
                f"{name} holds neither the base's weights nor what the engine's loader makes of "
                "them: the engine serves another checkpoint than this base"
            )


def _same(live: torch.Tensor, fresh: torch.Tensor) -> bool:
    if (live.shape, live.stride(), live.dtype) != (fresh.shape, fresh.stride(), fresh.dtype):
        return False
    return np.array_equal(bits_of(live), bits_of(fresh))
