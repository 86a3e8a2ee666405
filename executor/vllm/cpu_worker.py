"""`--worker-cls executor.vllm.cpu_worker.CpuKvWorker`: CPU ranks whose KV pages can go.

An engine whose worker is inside its engine core needs no such class.
"""

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.worker.cpu_worker import CPUWorker

from executor.vllm.rank_worker import GatedStart, RankedWorker

# A step whose notice was lost is found so much later.
LOOK_AGAIN_MS = 1


def sleep_between_steps() -> None:
    """Let queues of this process that wait for a message sleep.

    For a second after each message vLLM's look for the next one busily, on a core that is lent
    meanwhile. Its notices get lost where they follow fast upon each other, and a queue that sleeps
    looks by itself every 5 s.
    """
    waits = getattr(shm_broadcast, "SpinCondition", None)
    if waits is None or hasattr(waits, "sleeps"):
        return

    class SleepingCondition(waits):  # type: ignore[misc, valid-type] # vLLM's types are not ours
        sleeps = True

        def wait(self, timeout_ms: int | None = None) -> None:
            self.busy_loop_s = 0.0
            super().wait(LOOK_AGAIN_MS if timeout_ms is None else min(timeout_ms, LOOK_AGAIN_MS))

    shm_broadcast.SpinCondition = SleepingCondition


class CpuKvWorker(RankedWorker, GatedStart, CPUWorker):  # type: ignore[misc] # vLLM's types are not ours
    """CPU worker of vLLM whose scheduler moves its KV pages; a guest's start passes the gate."""

    def init_device(self) -> None:
        """Initialize the rank as vLLM does; between steps it sleeps."""
        sleep_between_steps()
        super().init_device()
