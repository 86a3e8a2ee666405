"""WeightWorker: the methods by which a replica updates the weights of vLLM's ranks."""

from typing import Any

from weight_transfer.apply.replica_weights import ReplicaWeights, WeightMethods, names_errors
from weight_transfer.vllm.adapters import AdaptedModel, AdapterWeights
from weight_transfer.vllm.live_model import VllmModel


class WeightWorker(WeightMethods):
    """Weight methods of one rank, mixed into vLLM's worker by `--worker-extension-cls`."""

    model_runner: Any

    @names_errors
    def rose_adapters_drop(self, names: list[str]) -> None:
        """Give the slots of these adapters back; no request may use them any more."""
        weights = self._rose()
        assert isinstance(weights, AdapterWeights)
        weights.drop(names)

    @property
    def _weights_class(self) -> type[ReplicaWeights]:
        return AdapterWeights if self._adapts else super()._weights_class

    @property
    def _adapts(self) -> bool:
        return self.model_runner.vllm_config.lora_config is not None

    def _engine_model(self) -> VllmModel:
        return (AdaptedModel if self._adapts else VllmModel).of(self.model_runner)
