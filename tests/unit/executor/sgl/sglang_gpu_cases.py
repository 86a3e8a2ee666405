"""SGLang's KV buffers in a reservation of a stand-in GPU, as tensors tell of themselves."""

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

from executor.cuda.backing import Reservation
from executor.cuda.kv_memory import reserve_kv
from executor.engine_settings import CUDA, HOST, LEND, EngineSettings
from tests.fakes.cuda.driver import PAGE, StandInDevice, StandInDriver
from tests.fakes.sglang_scheduler import StandInPool

ROW = 16 << 10
"""Bytes of a token's keys in one layer: a page has 128 tokens of them."""
TOKENS = PAGE // ROW
GRANULES, PARTS = 16, 4
"""Two layers, each with keys and values."""
SLOTS = GRANULES * TOKENS - 1
ALL = GRANULES * PARTS
_SPACES = count()


def settings_of(role: str, backend: str = CUDA, socket: str = "", page: str = "") -> EngineSettings:
    return EngineSettings(
        role,
        page,
        0.0,
        0.0,
        orphan_s=60.0,
        level=LEND if role == HOST else "observe",
        kv_backend=backend,
        page_socket=socket,
    )


@dataclass
class DevicePart:
    """Keys or values of one layer at an address of a device, as a tensor tells of itself."""

    address: int
    kind: str = "cuda"

    @property
    def device(self) -> Any:
        return SimpleNamespace(type=self.kind)

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return True

    def stride(self, _: int) -> int:
        return ROW // 2

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return (SLOTS + 1) * ROW // 2


def device_cache(address: int) -> Any:
    """SGLang's KV pool of two layers in a reservation at this address."""
    parts = [DevicePart(address + part * GRANULES * PAGE) for part in range(PARTS)]
    return StandInPool(keys=parts[0::2], values=parts[1::2])


class GpuMemory:
    """A stand-in GPU, this process's driver, and a reservation for the KV cache."""

    def __init__(self, device: StandInDevice, settings: EngineSettings) -> None:
        self.driver = StandInDriver(device)
        # Two ranks in one process have addresses of their own.
        self.driver._next_address += next(_SPACES) << 36
        self.reservation: Reservation = reserve_kv(settings, self.driver, ALL * PAGE)

    def check(self, held: set[int]) -> None:
        """A granule has its own pages, unless it is held; no address faults."""
        mapping = self.reservation.mapping
        for page in range(mapping.pages):
            if page % GRANULES not in held:
                assert mapping.behind(page) != mapping.alias, f"page {page} has no memory"
        assert all(mapped.usable for mapped in self.driver.mapped.values())
