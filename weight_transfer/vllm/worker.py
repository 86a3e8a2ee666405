"""Worker extension of vLLM: weight updates by `collective_rpc`, on every rank."""

from __future__ import annotations

from typing import Any

from weight_transfer.engine.worker import WeightMethods
from weight_transfer.vllm.engine_model import VllmModel


class WeightWorker(WeightMethods):
    """Mixed into vLLM's worker by `--worker-extension-cls`."""

    model_runner: Any

    def _engine_model(self) -> VllmModel:
        runner = self.model_runner
        return VllmModel.of(runner.get_model(), runner.vllm_config, runner.device)
