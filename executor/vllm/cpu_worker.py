"""`--worker-cls executor.vllm.cpu_worker.CpuKvWorker`: CPU ranks whose KV pages can go.

An engine whose worker is inside its engine core needs no such class.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from executor.vllm.rank_worker import GatedStart, RankedWorker


class CpuKvWorker(RankedWorker, GatedStart, CPUWorker):  # type: ignore[misc] # vLLM's types are not ours
    """CPU worker of vLLM whose scheduler moves its KV pages; a guest's start passes the gate."""
