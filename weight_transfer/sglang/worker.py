"""Weight updates in SGLang's scheduler, which holds its rank's model: its methods, by name."""

from __future__ import annotations

from typing import Any

from weight_transfer.engine.worker import WeightMethods
from weight_transfer.sglang.engine_model import SglangModel


class WeightWorker(WeightMethods):
    """Beside one rank's scheduler."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's
        self._runner = scheduler.tp_worker.model_runner

    def _engine_model(self) -> SglangModel:
        return SglangModel.of(self._runner)
