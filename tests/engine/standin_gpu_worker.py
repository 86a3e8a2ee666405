"""`--worker-cls standin_gpu_worker.StandInGpuWorker`: a CPU engine whose KV cache is a GPU's pages.

With a stand-in for the driver's library (`standin_libcuda.c`) those pages are files in memory: the
engine computes on the CPU, and its memory goes and comes back as a GPU's does.
"""

import ctypes

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from executor.cuda.backing import Reservation
from executor.cuda.driver import open_driver
from executor.vllm.reserved_worker import ReservedKvWorker


class StandInGpuWorker(ReservedKvWorker, CPUWorker):
    def _reserved(self, size: int) -> torch.Tensor:
        reservation = Reservation(open_driver(), size)
        memory = (ctypes.c_int8 * size).from_address(reservation.address)
        return torch.frombuffer(memory, dtype=torch.int8)
