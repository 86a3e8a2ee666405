"""A proof that misses a kind of weight is refused, by the weight's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weight_transfer.apply.probe import insist_on_sight
from weight_transfer.apply.reference import Reference
from weight_transfer.errors import ProbeError


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.proj = nn.Parameter(torch.randn(6, 6, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.proj + self.bias


class Model(nn.Module):
    """Two layers; the probe's tokens are rows of `embed`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embed = nn.Parameter(torch.randn(300, 6, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layers = nn.ModuleList([Layer(0), Layer(1)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed[tokens] * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Packed(Layer):
    """Computes with a copy that it took once."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "copy"):
            self.copy = self.proj.clone()
        return hidden @ self.copy + self.bias


def proven(live: Model, reference: Callable[[], nn.Module]) -> None:
    tokens = torch.arange(7, 290, 31)
    engine: Any = SimpleNamespace(
        model=live, prober=SimpleNamespace(logits=lambda model: model(tokens).clone())
    )
    weights = dict(live.named_parameters())
    loader_map: Any = SimpleNamespace(filled=tuple(weights), parameter=weights.__getitem__)

    def pieces() -> Iterator[None]:
        yield
        return Reference(engine.prober.logits(reference()), {})  # type: ignore[return-value]

    with torch.inference_mode():
        insist_on_sight(engine, loader_map, pieces)  # type: ignore[arg-type]


def test_a_proof_that_sees_every_weight_leaves_them_as_they_were() -> None:
    live, fresh = Model(), Model()
    proven(live, lambda: fresh)
    for name, weight in live.named_parameters():
        assert torch.equal(weight, dict(fresh.named_parameters())[name]), name


def test_a_packed_copy_is_named() -> None:
    live = Model()
    live.layers[0] = Packed(0)
    with pytest.raises(ProbeError, match=r"does not compute with layers\.0\.proj"):
        proven(live, Model)


def test_a_reference_that_borrows_a_layer_of_the_live_model_is_refused() -> None:
    live, borrowing = Model(), Model()
    borrowing.layers[0] = live.layers[0]
    with pytest.raises(ProbeError, match="a fresh load of the base does not compute"):
        proven(live, lambda: borrowing)
