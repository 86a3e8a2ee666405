"""Proofs of an active version: the audit of its weights and the probe of what it computes.

Audit: digests of the weights that an engine really holds, in pieces between its steps.

Each rank sums over the weights it has; of a weight that several ranks or parameters hold, every
copy has to have the same sum. Together they are the checkpoint's digests, or a weight was flipped.

Probe: a version is active when the model computes what a fresh dense load of it computes.

Parameters prove nothing by themselves: engines keep packed copies, tied copies, caches. So a fixed
prompt goes through the live model and through a fresh dense load, and the logits of all positions
must agree in every bit. How a model of an engine's is run is its own (`prober`): both passes use a
part of the live KV cache as scratch that no request reads then, and put back what lay there.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weight_transfer.engine.loader_map import LoaderMap
from weight_transfer.engine.rectangle import Rectangle, flat_bits, flat_view
from weight_transfer.errors import ProbeError
from weight_transfer.format.digest import MODULUS

if TYPE_CHECKING:
    import torch


PIECE_ELEMENTS = 8 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Sum over some weights of a checkpoint tensor; `key` names them, on all ranks alike."""

    tensor: str
    key: tuple[int, ...]
    elements: int
    total: int


class Audit:
    """One pass over all mapped weights of one rank."""

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
        """True once every weight was summed."""
        return not self._left

    def step(self, elements: int) -> list[Part]:
        """Sum over about as many weights as `elements`; at least one piece."""
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
    """Fetch the piece alone, compacted; its sum is the host's work."""
    live = loader_map.flat(piece.target)
    part = live.as_strided(piece.shape, piece.target_strides, piece.target_offset).contiguous()
    strides = tuple(part.stride())
    return replace(piece, target_offset=0, target_strides=strides).digest_part(flat_bits(part))


@dataclass(frozen=True, slots=True)
class Findings:
    """`flipped`: checkpoint tensors whose live weights are wrong, or whose copies differ.

    `unjudged`: tensors of which the parts leave something out, as they do where ranks are missing
    or a loader transforms weights; their copies agree.
    """

    flipped: tuple[str, ...]
    unjudged: tuple[str, ...]


def judge(
    parts: Iterable[Part], digests: Mapping[str, int], elements: Mapping[str, int]
) -> Findings:
    """Compare all ranks' parts with `digests`; `elements`: how many each tensor has."""
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


PROBE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe: bit-for-bit equality, and the largest absolute difference.

    Where a difference is no number, the largest float stands for it: reports are JSON.
    """

    ok: bool
    max_abs_diff: float


def probe_prompt(vocab_size: int) -> list[int]:
    """Return the fixed probe prompt: tokens spread over the vocabulary, none special."""
    return [(7 + 31 * position) % vocab_size for position in range(PROBE_TOKENS)]


def compare(live: torch.Tensor, fresh: torch.Tensor) -> ProbeResult:
    """Compare two logits tensors [tokens, vocabulary] bit for bit."""
    if live.shape != fresh.shape:
        raise ProbeError(f"logits {tuple(live.shape)} and {tuple(fresh.shape)} cannot be compared")
    import torch

    if torch.equal(flat_view(live.contiguous()), flat_view(fresh.contiguous())):
        return ProbeResult(ok=True, max_abs_diff=0.0)
    diff = float((live.double() - fresh.double()).abs().max())
    return ProbeResult(ok=False, max_abs_diff=diff if math.isfinite(diff) else sys.float_info.max)
