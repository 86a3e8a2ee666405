"""EngineModel: the few things of a running vLLM worker that weight updates need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weight_transfer.vllm.probe import Prober

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A live model with its configuration, and the probe for models like it."""

    model: torch.nn.Module
    vllm_config: Any
    device: torch.device
    prober: Prober

    @classmethod
    def of(cls, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> EngineModel:  # noqa: ANN401 -- vLLM's
        """Of a worker whose KV cache exists."""
        return cls(model, vllm_config, device, Prober(vllm_config, device))
