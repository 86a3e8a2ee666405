"""Plugin that makes the weight transfer backend `rose` known to vLLM; nothing of it is imported."""

from __future__ import annotations

NAME = "rose"


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM loads plugins in each process, at times twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        module = "weight_transfer.vllm.vllm_backend"
        WeightTransferEngineFactory.register_engine(NAME, module, "RoseWeightEngine")
