"""Proofs of an active version: audit of its weights, probe of what it computes, test of the probe.

Audit: digests of the weights that an engine really holds, in pieces between its steps.

Each rank sums over the weights it has; of a weight that several ranks or parameters hold, every
copy has to have the same sum. Together they are the checkpoint's digests, or a weight was flipped.

Probe: a version is active when the model computes what a fresh dense load of it computes.

Parameters prove nothing by themselves: engines keep packed copies, tied copies, caches. So a fixed
prompt goes through the live model and through a fresh dense load, and the logits of all positions
must agree in every bit. How a model of an engine's is run is its own (`prober`): both passes use a
part of the live KV cache as scratch that no request reads then, and put back what lay there.

Test of the probe, at an engine's start: it must notice a changed weight of every kind.

A probe is blind where an engine computes with a copy of a weight, and where a reference computes
with the live model's weights. So with the base active
live        the probe's logits are those of a reference; and for each kind of weight, some weights
            of it are changed in the live model: its logits must change
reference   all kinds are changed at once, and a reference is made: its logits must not change
A kind is a parameter's name without its numbers: all layers' routers are one.
Where updates replace modules, one of all kinds is rehearsed besides, and undone.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from weight_transfer.apply.loader_map import LoaderMap
from weight_transfer.apply.receiver import StagedTensor
from weight_transfer.apply.reference import Reference, finish
from weight_transfer.apply.trace_loader import Rectangle, flat_bits, flat_view
from weight_transfer.errors import ProbeError
from weight_transfer.format.digest import MODULUS
from weight_transfer.format.tensors import TensorBits
from weight_transfer.kernels.processor import Change

if TYPE_CHECKING:
    import torch

    from weight_transfer.apply.loader_map import LoaderMap
    from weight_transfer.apply.reference import EngineModel


PIECE_ELEMENTS = 8 << 20
PROBE_TOKENS = 24
SPREAD = 65_536
"""Largest number of weights of one kind that are changed at once."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Part:
    """Digest sum over some weights of a checkpoint tensor.

    `key` identifies them, on all ranks alike.
    """

    tensor: str
    key: tuple[int, ...]
    elements: int
    total: int


class Audit:
    """Pass over all mapped live weights of one rank, which sums their digests in pieces."""

    def __init__(self, loader_map: LoaderMap) -> None:
        self._map = loader_map
        self._left = [
            piece
            for name in loader_map.names
            for rectangle in loader_map.rectangles(name)
            for piece in rectangle.pieces(PIECE_ELEMENTS)
        ][::-1]

    @property
    def done(self) -> bool:
        """True once the audit has summed every mapped weight of this rank."""
        return not self._left

    def step(self, elements: int) -> list[Part]:
        """Sum the next pieces of about `elements` weights, one piece at least.

        Return their sums.
        """
        parts: list[Part] = []
        while self._left and elements > 0:
            piece = self._left.pop()
            parts.append(self._part(piece))
            elements -= piece.elements
        return parts

    def _part(self, piece: Rectangle) -> Part:
        flat = self._map.parameter(piece.target)
        if flat.device.type == "cpu":
            total = piece.digest_part(flat_bits(flat))
        else:
            total = _on_device(piece, self._map)
        return Part(piece.source, piece.source_key, piece.elements, total)


def _on_device(piece: Rectangle, loader_map: LoaderMap) -> int:
    """Return the digest sum of a piece on a device, which is copied to the host and summed
    there."""
    live = loader_map.flat(piece.target)
    part = live.as_strided(piece.shape, piece.target_strides, piece.target_offset).contiguous()
    strides = tuple(part.stride())
    return replace(piece, target_offset=0, target_strides=strides).digest_part(flat_bits(part))


@dataclass(frozen=True, slots=True)
class Findings:
    """Result of an audit of all ranks, as sorted names of checkpoint tensors.

    `flipped`: tensors whose live weights are wrong, or whose copies differ. `unjudged`: tensors
    that the parts do not cover, because ranks are missing or a loader transforms weights; their
    copies agree.
    """

    flipped: tuple[str, ...]
    unjudged: tuple[str, ...]


def judge(
    parts: Iterable[Part], digests: Mapping[str, int], elements: Mapping[str, int]
) -> Findings:
    """Return which tensors are wrong: compare all ranks' parts of an audit with `digests`.

    `elements`: number of weights of each tensor.
    """
    totals: dict[str, dict[tuple[int, ...], Part]] = defaultdict(dict)
    wrong: set[str] = set()
    for part in parts:
        if totals[part.tensor].setdefault(part.key, part) != part:
            wrong.add(part.tensor)
    unjudged = set()
    for name, sums in totals.items():
        if sum(part.elements for part in sums.values()) != elements[name]:
            unjudged.add(name)
        elif sum(part.total for part in sums.values()) % MODULUS != digests[name]:
            wrong.add(name)
    return Findings(tuple(sorted(wrong)), tuple(sorted(unjudged - wrong)))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe: True if all bits agree, and the largest absolute difference of two logits.

    Where that difference is not finite the largest float stands for it, since reports are JSON.
    """

    ok: bool
    max_abs_diff: float


def probe_prompt(vocab_size: int) -> list[int]:
    """Return the token ids of the fixed probe prompt, spread over the vocabulary."""
    return [(7 + 31 * position) % vocab_size for position in range(PROBE_TOKENS)]


def compare(live: torch.Tensor, fresh: torch.Tensor) -> ProbeResult:
    """Return whether two logits tensors of one shape agree bit for bit, and their largest
    difference.

    Raises ProbeError for different shapes.
    """
    if live.shape != fresh.shape:
        raise ProbeError(f"logits {tuple(live.shape)} and {tuple(fresh.shape)} cannot be compared")
    import torch

    if torch.equal(flat_view(live.contiguous()), flat_view(fresh.contiguous())):
        return ProbeResult(ok=True, max_abs_diff=0.0)
    diff = float((live.double() - fresh.double()).abs().max())
    return ProbeResult(ok=False, max_abs_diff=diff if math.isfinite(diff) else sys.float_info.max)


def insist_on_sight(
    engine: EngineModel,
    loader_map: LoaderMap,
    reference: Callable[[], Generator[None, None, Reference]],
) -> None:
    """Raise ProbeError that names the first kind of weight whose change the probe would not notice.

    Call it only between an engine's steps: weights of each kind are changed and put back.
    """
    live = engine.prober.logits(engine.model)
    kinds: dict[str, str] = {}
    for name in loader_map.filled:
        kinds.setdefault(kind_of(name), name)
    seen: list[tuple[str, list[int]]] = []
    for name in kinds.values():
        places = noticed(
            lambda: engine.prober.logits(engine.model), loader_map.parameter(name), live
        )
        if places is None:
            raise ProbeError(
                f"the engine does not compute with {name} where it lies in memory, so no update of "
                "it could be proven: serve weights in a format that the engine does not pack"
            )
        seen.append((name, places))
    with ExitStack() as changes:
        for name, places in seen:
            changes.enter_context(_changed(loader_map.parameter(name), places))
        result = compare(finish(reference()).logits, live)
    if not result.ok:
        raise ProbeError(
            "a fresh load of the base does not compute what the engine computes, by "
            f"{result.max_abs_diff:g}: updates of this model cannot be proven on this engine"
        )


def noticed(
    logits: Callable[[], torch.Tensor], weight: torch.Tensor, live: torch.Tensor
) -> list[int] | None:
    """Return indices of elements of `weight` whose change makes `logits` differ from `live`, None
    if no change does. The elements are put back.
    """
    for places in _places(weight):
        with _changed(weight, places):
            if not compare(logits(), live).ok:
                return places
    return None


def kind_of(name: str) -> str:
    """Return a parameter's name without its numbers, which is the same for all layers."""
    return _NUMBER.sub("", name)


def flipped(tensor: TensorBits) -> StagedTensor:
    """Return a change of all of a checkpoint tensor's weights: of the other sign, or of one lower
    bit for scales and truth values, which have none."""
    bits, unsigned = tensor.bits, tensor.dtype in ("float8_e8m0fnu", "bool")
    bit = bits.dtype.type(1 if unsigned else 1 << (8 * bits.itemsize - 1))
    return StagedTensor(tensor.name, Change(np.arange(bits.size), bits, bits ^ bit), 0)


def _places(weight: torch.Tensor) -> Iterator[list[int]]:
    """Yield lists of indices to change, one after the other: single weights, then many, spread out.

    The first lies in the row of the first probe token, should the weight have a row for each token.
    """
    rows = weight.shape[0] if weight.dim() else 1
    columns = weight.numel() // rows
    yield [probe_prompt(rows)[0] * columns + columns // 2]
    yield [weight.numel() // 3]
    yield list(range(0, weight.numel(), 1 + (weight.numel() - 1) // SPREAD))


@contextmanager
def _changed(weight: torch.Tensor, places: list[int]) -> Iterator[None]:
    """Change the weights at `places` of `weight` within the block, and put them back."""
    import torch

    weight = weight if weight.dim() else weight[None]
    index = torch.tensor(places, device=weight.device)
    where = torch.unravel_index(index, weight.shape)
    with torch.inference_mode():
        old = weight[where].clone()
        weight[where] = _other(old)
    try:
        yield
    finally:
        with torch.inference_mode():
            weight[where] = old


def _other(old: torch.Tensor) -> torch.Tensor:
    """Return different weights: of the other sign and eight times larger, 1 for 0.

    Integers and one-byte floats get other bits.
    """
    import torch

    if old.is_floating_point() and old.element_size() > 1:
        return torch.where(old == 0, torch.ones_like(old), -8 * old)
    bits = old.view(torch.uint8)
    return (bits ^ (0x80 if old.is_floating_point() else 0x55)).view(old.dtype)
