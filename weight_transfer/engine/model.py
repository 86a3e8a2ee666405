"""What an update asks of an engine's model, whichever engine it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


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
        """Where the engine computes."""
        ...

    def skeleton(self, device: torch.device) -> torch.nn.Module:
        """Build a second instance of the engine's model, its weights not loaded."""
        ...

    def loading(self) -> AbstractContextManager[Any]:
        """What the engine's loaders and their processing run in."""
        ...

    def process(self, module: torch.nn.Module) -> None:
        """Do what the engine does once weights are loaded."""
        ...


class EngineModel(ModelLoader, Protocol):
    """A live model, whose KV cache exists, and the probe for models like it."""

    @property
    def layerwise(self) -> bool:
        """Whether a model computes with one layer's weights in memory at a time, each layer's
        output being all that the next one gets."""
        ...

    @property
    def model(self) -> torch.nn.Module:
        """The one that the engine computes with."""
        ...

    @property
    def prober(self) -> Prober:
        """The probe for models like it."""
        ...
