"""The cards as NVIDIA's management library tells them."""

import ctypes
from collections.abc import Callable
from typing import Any

from rose.nvml.card import Card, Client, Usage
from rose.nvml.library import Library, MemoryInfo, insist, load_library

_SM, _MEMORY = 1, 2
_CLIENTS = "nvmlDeviceGetComputeRunningProcesses_v3"
_MPS_CLIENTS = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
# NVML_VALUE_NOT_AVAILABLE.
_NOT_TOLD = 2**64 - 1
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
SLOWED_BY = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


class Nvml:
    """CardReader. Any thread may ask."""

    def __init__(self, open_library: Callable[[], Any] = load_library) -> None:
        """Raises CardError where there is no driver."""
        self._library = Library(open_library)

    def cards(self) -> tuple[Card, ...]:
        """All cards of the machine, in the driver's order."""
        count = self._library.number("nvmlDeviceGetCount_v2")
        return tuple(self._card(index) for index in range(count))

    def usage(self, card: Card) -> Usage:
        """Look at one of them."""
        known = self._library.known
        at = self._handle(card.index)
        memory = self._memory(at)
        power_mw = known("nvmlDeviceGetPowerUsage", at)
        slowed = known("nvmlDeviceGetCurrentClocksThrottleReasons", at, kind=ctypes.c_ulonglong)
        return Usage(
            free_bytes=memory.free,
            used_bytes=memory.used,
            processes=tuple(client.pid for client in self._clients(at)),
            sm_mhz=known("nvmlDeviceGetClockInfo", at, _SM),
            memory_mhz=known("nvmlDeviceGetClockInfo", at, _MEMORY),
            power_w=None if power_mw is None else power_mw / 1e3,
            temperature_c=known("nvmlDeviceGetTemperature", at, 0),
            slowed=tuple(why for bit, why in SLOWED_BY.items() if (slowed or 0) & bit),
        )

    def clients(self, card: Card) -> tuple[Client, ...]:
        """Who computes on it, and with how much of its memory."""
        return self._clients(self._handle(card.index))

    def free_bytes(self, card: Card) -> int:
        """Memory that nobody has."""
        return int(self._memory(self._handle(card.index)).free)

    def _card(self, index: int) -> Card:
        library = self._library
        known = library.known
        at = self._handle(index)
        memory = MemoryInfo()
        # Refused to some on a card that is cut, which is said first.
        library.ask("nvmlDeviceGetMemoryInfo", at, ctypes.byref(memory))
        version = known("nvmlSystemGetCudaDriverVersion_v2", kind=ctypes.c_int) or 0
        limit_mw = known("nvmlDeviceGetEnforcedPowerLimit", at)
        persistence = known("nvmlDeviceGetPersistenceMode", at)
        mode = known("nvmlDeviceGetComputeMode", at)
        return Card(
            index=index,
            name=library.text("nvmlDeviceGetName", at),
            uuid=library.text("nvmlDeviceGetUUID", at),
            driver=library.text("nvmlSystemGetDriverVersion"),
            cuda=(version // 1000, version % 1000 // 10),
            mig=self._mig(at),
            compute_mode=COMPUTE_MODES.get(mode or 0, "unknown"),
            persistence=None if persistence is None else bool(persistence),
            memory_bytes=memory.total,
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            sm_mhz_most=known("nvmlDeviceGetMaxClockInfo", at, _SM),
            memory_mhz_most=known("nvmlDeviceGetMaxClockInfo", at, _MEMORY),
        )

    def _handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        name = "nvmlDeviceGetHandleByIndex_v2"
        self._library.call(name, ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def _memory(self, at: ctypes.c_void_p) -> MemoryInfo:
        memory = MemoryInfo()
        self._library.call("nvmlDeviceGetMemoryInfo", at, ctypes.byref(memory))
        return memory

    def _mig(self, at: ctypes.c_void_p) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        refs = ctypes.byref(current), ctypes.byref(pending)
        # A card that cannot be cut says that it does not know the question.
        return self._library.ask("nvmlDeviceGetMigMode", at, *refs) == 0 and bool(current.value)

    def _clients(self, at: ctypes.c_void_p) -> tuple[Client, ...]:
        """Clients of MPS may stand in either list or in both."""
        status, listed = self._library.processes(_CLIENTS, at)
        insist(_CLIENTS, status)
        # Drivers and cards without MPS do not know this question.
        _, below_mps = self._library.processes(_MPS_CLIENTS, at)
        memory: dict[int, int | None] = {}
        for info in (*listed, *below_mps):
            told = None if info.used in (0, _NOT_TOLD) else int(info.used)
            known = memory.get(int(info.pid))
            memory[int(info.pid)] = max(known or 0, told or 0) or None
        mps = {int(info.pid) for info in below_mps}
        return tuple(Client(pid, used, pid in mps) for pid, used in memory.items())
