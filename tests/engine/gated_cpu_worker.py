"""vLLM's own CPU worker with a gated start, as `ReservedKvWorker` is its GPU worker with one."""

from vllm.v1.worker.cpu_worker import CPUWorker

from executor.vllm.gated_start import GatedStart


class GatedCpuWorker(GatedStart, CPUWorker):
    """For tests."""
