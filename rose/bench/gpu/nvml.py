"""The cards as NVIDIA's management library tells them.

Called through ctypes: the library comes with every driver, a Python package for it does not.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from rose.bench.gpu.card import Card, Usage
from rose.bench.gpu.errors import CardError

LIBRARY = "libnvidia-ml.so.1"
NO_DRIVER, VERSIONS_DIFFER, TOO_SMALL = 9, 18, 7
_HINTS = {
    NO_DRIVER: "load the NVIDIA driver (is the kernel module there?)",
    VERSIONS_DIFFER: "the driver was updated under a running kernel module; its owner must reload",
}
_TEXT_BYTES = 96
_SM, _MEMORY = 1, 2
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


class MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def load_library() -> Any:  # noqa: ANN401 -- ctypes knows no more
    """Open the driver's library. Raises CardError where there is none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CardError(
            f"no NVIDIA driver is here ({LIBRARY} cannot be opened);"
            " run on a machine with an NVIDIA GPU and its driver"
        ) from error


class Nvml:
    """CardReader."""

    def __init__(self, open_library: Callable[[], Any] = load_library) -> None:
        self._library = open_library()
        self._call("nvmlInit_v2")

    def cards(self) -> tuple[Card, ...]:
        """All cards of the machine, in the driver's order."""
        count = self._number("nvmlDeviceGetCount_v2")
        return tuple(self._card(index) for index in range(count))

    def usage(self, card: Card) -> Usage:
        """Look at one of them."""
        at = self._handle(card.index)
        memory = MemoryInfo()
        self._call("nvmlDeviceGetMemoryInfo", at, ctypes.byref(memory))
        power_mw = self._known("nvmlDeviceGetPowerUsage", at)
        slowed = self._known(
            "nvmlDeviceGetCurrentClocksThrottleReasons", at, kind=ctypes.c_ulonglong
        )
        return Usage(
            free_bytes=memory.free,
            used_bytes=memory.used,
            processes=self._processes(at),
            sm_mhz=self._known("nvmlDeviceGetClockInfo", at, _SM),
            memory_mhz=self._known("nvmlDeviceGetClockInfo", at, _MEMORY),
            power_w=None if power_mw is None else power_mw / 1e3,
            temperature_c=self._known("nvmlDeviceGetTemperature", at, 0),
            slowed=tuple(why for bit, why in SLOWED_BY.items() if (slowed or 0) & bit),
        )

    def _card(self, index: int) -> Card:
        at = self._handle(index)
        memory = MemoryInfo()
        # Refused to some on a card that is cut, which is said first.
        self._ask("nvmlDeviceGetMemoryInfo", at, ctypes.byref(memory))
        version = self._known("nvmlSystemGetCudaDriverVersion_v2", kind=ctypes.c_int) or 0
        limit_mw = self._known("nvmlDeviceGetEnforcedPowerLimit", at)
        persistence = self._known("nvmlDeviceGetPersistenceMode", at)
        mode = self._known("nvmlDeviceGetComputeMode", at)
        return Card(
            index=index,
            name=self._text("nvmlDeviceGetName", at),
            uuid=self._text("nvmlDeviceGetUUID", at),
            driver=self._text("nvmlSystemGetDriverVersion"),
            cuda=(version // 1000, version % 1000 // 10),
            mig=self._mig(at),
            compute_mode=COMPUTE_MODES.get(mode or 0, "unknown"),
            persistence=None if persistence is None else bool(persistence),
            memory_bytes=memory.total,
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            sm_mhz_most=self._known("nvmlDeviceGetMaxClockInfo", at, _SM),
            memory_mhz_most=self._known("nvmlDeviceGetMaxClockInfo", at, _MEMORY),
        )

    def _handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def _mig(self, at: ctypes.c_void_p) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        refs = ctypes.byref(current), ctypes.byref(pending)
        # A card that cannot be cut says that it does not know the question.
        return self._ask("nvmlDeviceGetMigMode", at, *refs) == 0 and bool(current.value)

    def _processes(self, at: ctypes.c_void_p) -> tuple[int, ...]:
        room = 64
        while True:
            found = (ProcessInfo * room)()
            count = ctypes.c_uint(room)
            name = "nvmlDeviceGetComputeRunningProcesses_v3"
            status = self._ask(name, at, ctypes.byref(count), found)
            if status != TOO_SMALL:
                break
            room = count.value + 64
        self._insist(name, status)
        return tuple(int(process.pid) for process in found[: count.value])

    def _text(self, name: str, *at: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(name, *at, text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode(errors="replace")

    def _number(self, name: str, *arguments: object) -> int:
        found = self._known(name, *arguments)
        if found is None:
            raise CardError(f"the NVIDIA driver does not answer {name}; update it")
        return found

    def _known(self, name: str, *arguments: object, kind: Any = ctypes.c_uint) -> int | None:  # noqa: ANN401
        """A number, None where this card or driver does not tell it."""
        number = kind()
        status = self._ask(name, *arguments, ctypes.byref(number))
        return int(number.value) if status == 0 else None

    def _call(self, name: str, *arguments: object) -> None:
        self._insist(name, self._ask(name, *arguments))

    def _ask(self, name: str, *arguments: object) -> int:
        """Status of a call, -1 when the driver is too old to know it."""
        function = getattr(self._library, name, None)
        return -1 if function is None else int(function(*arguments))

    def _insist(self, name: str, status: int) -> None:
        if status:
            hint = _HINTS.get(status, "see what nvidia-smi says")
            raise CardError(f"the NVIDIA driver refuses {name} (NVML status {status}); {hint}")
