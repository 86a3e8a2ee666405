"""Test of a proof, at an engine's start: it must notice a changed weight of every kind.

A probe is blind where an engine computes with a copy of a weight, and where a reference computes
with the live model's weights. So with the base active
live        the probe's logits are those of a reference; and for each kind of weight, some weights
            of it are changed in the live model: its logits must change
reference   all kinds are changed at once, and a reference is made: its logits must not change
A kind is a parameter's name without its numbers: all layers' routers are one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from weight_transfer.engine.proof.probe import compare, probe_prompt
from weight_transfer.engine.proof.reference import Reference, finish
from weight_transfer.errors import ProbeError

if TYPE_CHECKING:
    import torch

    from weight_transfer.engine.loader_map import LoaderMap
    from weight_transfer.engine.model import EngineModel

SPREAD = 65_536
"""Most weights of a kind that are changed at once."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def insist_on_sight(
    engine: EngineModel,
    loader_map: LoaderMap,
    reference: Callable[[], Generator[None, None, Reference]],
) -> None:
    """Raise ProbeError that names the first kind of weight that the proof of `engine` misses.

    Only between an engine's steps; every weight is put back.
    """
    live = engine.prober.logits(engine.model)
    kinds: dict[str, str] = {}
    for name in loader_map.filled:
        kinds.setdefault(_NUMBER.sub("", name), name)
    seen: list[tuple[str, list[int]]] = []
    for name in kinds.values():
        for places in _places(loader_map.parameter(name)):
            with _changed(loader_map.parameter(name), places):
                noticed = not compare(engine.prober.logits(engine.model), live).ok
            if noticed:
                seen.append((name, places))
                break
        else:
            raise ProbeError(
                f"the engine does not compute with {name} where it lies in memory, so no update of "
                "it could be proven: serve weights in a format that the engine does not pack"
            )
    with ExitStack() as changes:
        for name, places in seen:
            changes.enter_context(_changed(loader_map.parameter(name), places))
        result = compare(finish(reference()).logits, live)
    if not result.ok:
        raise ProbeError(
            "a fresh load of the base does not compute what the engine computes, by "
            f"{result.max_abs_diff:g}: updates of this model cannot be proven on this engine"
        )


def _places(weight: torch.Tensor) -> Iterator[list[int]]:
    """Return what to change, one after the other: single weights, then many, spread out.

    The first lies in the row of the first probe token, should the weight have a row a token.
    """
    rows = weight.shape[0] if weight.dim() else 1
    columns = weight.numel() // rows
    yield [probe_prompt(rows)[0] * columns + columns // 2]
    yield [weight.numel() // 3]
    yield list(range(0, weight.numel(), 1 + (weight.numel() - 1) // SPREAD))


@contextmanager
def _changed(weight: torch.Tensor, places: list[int]) -> Iterator[None]:
    """Have other weights at `places` of `weight`, in the order of its elements."""
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
    """Return weights of the other sign and larger, one for zero; integers, other bits."""
    import torch

    if old.is_floating_point() and old.element_size() > 1:
        return torch.where(old == 0, torch.ones_like(old), -8 * old)
    bits = old.view(torch.uint8)
    return (bits ^ (0x80 if old.is_floating_point() else 0x55)).view(old.dtype)
