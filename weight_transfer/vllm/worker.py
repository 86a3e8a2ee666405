"""Worker extension of vLLM: weight updates by `collective_rpc`, on every rank."""

from __future__ import annotations

from typing import Any

from weight_transfer.engine.worker import WeightMethods
from weight_transfer.vllm.engine_model import VllmModel


class WeightWorker(WeightMethods):
    """Mixed into vLLM's worker by `--worker-extension-cls`."""

    model_runner: Any

    def _engine_model(self) -> VllmModel:
        return VllmModel.of(self.model_runner)
