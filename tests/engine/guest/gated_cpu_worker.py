"""`CpuKvWorker` over a worker whose start runs the model, as a GPU's does."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from executor.vllm.rank_worker import GatedStart, RankedWorker

SIZES = (16, 1)


class WarmingCpuWorker(CPUWorker):
    """Runs the model at its start through its own runner, as the GPU worker does."""

    def compile_or_warm_up_model(self) -> Any:
        for tokens in SIZES:
            self.model_runner._dummy_run(tokens)
        return super().compile_or_warm_up_model()


class GatedCpuWorker(RankedWorker, GatedStart, WarmingCpuWorker):
    """CPU worker with a gate, for tests."""
