"""Plugin `rose_guest` of SGLang on a CPU whose KV buffers are a GPU's pages.

With a stand-in for the driver's library (`standin_libcuda.c`) those pages are files in memory: the
engine computes on the CPU, and its memory goes and comes back as a GPU's does.
"""

import ctypes
from typing import Any

import torch

import executor.sglang.guest.plugin as plugin
from executor.cuda.driver import open_driver
from executor.cuda.kv_memory import reserve_kv
from executor.sglang.reserved_pool import ReservedBuffers


class StandInBuffers(ReservedBuffers):
    device_type = "cpu"

    def open_driver(self) -> Any:
        return open_driver()

    def memory(self, driver: Any, size: int) -> torch.Tensor:
        reservation = reserve_kv(self._settings, driver, size)
        memory = (ctypes.c_int8 * size).from_address(reservation.address)
        return torch.frombuffer(memory, dtype=torch.int8)


def register() -> None:
    plugin.ReservedBuffers = StandInBuffers  # type: ignore[misc]
    plugin.register()
