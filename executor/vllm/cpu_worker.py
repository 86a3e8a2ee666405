"""`--worker-cls executor.vllm.cpu_worker.CpuKvWorker`: CPU ranks whose KV pages can go.

An engine whose worker is inside its engine core needs no such class.
"""

from functools import partial

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.worker.cpu_worker import CPUWorker

from executor.vllm.rank_worker import GatedStart, RankedWorker


class CpuKvWorker(RankedWorker, GatedStart, CPUWorker):  # type: ignore[misc] # vLLM's types are not ours
    """CPU worker of vLLM whose scheduler moves its KV pages; a guest's start passes the gate."""

    def init_device(self) -> None:
        """Initialize the rank as vLLM does; between steps it sleeps.

        For a second after each step vLLM's ranks look for the next one busily, on a core that is
        lent meanwhile.
        """
        if waits := getattr(shm_broadcast, "SpinCondition", None):
            shm_broadcast.SpinCondition = partial(waits, busy_loop_s=0)
        super().init_device()
