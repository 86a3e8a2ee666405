"""Interface of an engine's model, as an update uses it."""

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
