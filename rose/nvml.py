"""Reader of NVIDIA cards through NVML, the driver's management library, called by ctypes.

The library comes with every driver; a Python package for it does not. Reads alone: no setting, no
reset.

`card_of` finds a card by index or UUID, and `insist_usable` checks whether ROSE can work on it.

RoseError
└── CardError     no driver, no such card, or one that cannot be used now: nothing was touched
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rose.errors import RoseError


@dataclass(frozen=True, slots=True)
class Card:
    """Fixed properties of a card. None: the card does not tell.

    cuda: highest CUDA version (major, minor) that the driver serves.
    """

    index: int
    name: str
    uuid: str
    driver: str
    cuda: tuple[int, int]
    mig: bool
    compute_mode: str
    persistence: bool | None
    memory_bytes: int
    power_limit_w: float | None
    sm_mhz_most: int | None
    memory_mhz_most: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Load of a card at one moment. `slowed`: why its clocks are lower than they could be.

    processes: ids of those that compute on it, as the driver counts them: in a container they may
    be another namespace's, or hidden.
    """

    free_bytes: int
    used_bytes: int
    processes: tuple[int, ...]
    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    slowed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Client:
    """A process that computes on a card. `pid`: as the driver counts, see `Usage.processes`.

    memory_bytes: None where the driver does not tell. mps: it is a client of MPS.
    """

    pid: int
    memory_bytes: int | None
    mps: bool = False


class CardReader(Protocol):
    """Reader of the cards of this machine, through their driver."""

    def cards(self) -> tuple[Card, ...]:
        """All cards of the machine. Raises CardError when there is no driver that answers."""
        ...

    def usage(self, card: Card) -> Usage:
        """Look at one of them. Raises CardError."""
        ...

    def clients(self, card: Card) -> tuple[Client, ...]:
        """Who computes on it, and with how much of its memory. Raises CardError."""
        ...

    def free_bytes(self, card: Card) -> int:
        """Memory of it that nobody has. Raises CardError."""
        ...


class CardError(RoseError):
    """A GPU cannot be used, or its driver does not answer."""


def card_of(cards: tuple[Card, ...], device: int | str) -> Card:
    """The card of that index, or the one whose UUID is or begins with `device`.

    Raises CardError when there is none, or when several begin so.
    """
    if not cards:
        raise CardError("the NVIDIA driver sees no GPU; run on a machine with one")
    if isinstance(device, int):
        found = [card for card in cards if card.index == device]
    else:
        found = [card for card in cards if card.uuid.startswith(device)]
    if len(found) != 1:
        known = ", ".join(f"{card.index}: {card.name} {card.uuid}" for card in cards)
        raise CardError(f"GPU {device} is none or more than one of {known}; name one of them")
    return found[0]


LEAST_CUDA = (12, 8)


def insist_usable(card: Card) -> None:
    """Raise CardError, with what to do, when nothing of ROSE runs there."""
    if card.cuda < LEAST_CUDA:
        raise CardError(
            f"driver {card.driver} serves CUDA {version_text(card.cuda)}, and"
            f" {version_text(LEAST_CUDA)} is needed; use a machine with driver 570 or newer"
        )
    if card.mig:
        raise CardError(
            f"MIG is on: {card.name} is cut into instances; use a whole card"
            " (ROSE never changes a card's settings)"
        )
    if card.compute_mode == "prohibited":
        raise CardError(f"{card.name} is in compute mode prohibited; its owner must allow work")


def version_text(version: tuple[int, int]) -> str:
    """As a person reads it."""
    return "unknown" if version == (0, 0) else f"{version[0]}.{version[1]}"


LIBRARY = "libnvidia-ml.so.1"
OK, UNKNOWN_CALL, TOO_SMALL, NO_DRIVER, VERSIONS_DIFFER = 0, -1, 7, 9, 18
_HINTS = {
    NO_DRIVER: "load the NVIDIA driver (is the kernel module there?)",
    VERSIONS_DIFFER: "the driver was updated under a running kernel module; its owner must reload",
}
_TEXT_BYTES = 96


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


class Library:
    """Its functions by name. Each raises CardError but `ask` and `known`."""

    def __init__(self, open_library: Callable[[], Any] = load_library) -> None:
        self._library = open_library()
        self.call("nvmlInit_v2")

    def ask(self, name: str, *arguments: object) -> int:
        """Status of a call, UNKNOWN_CALL when the driver is too old to know it."""
        function = getattr(self._library, name, None)
        return UNKNOWN_CALL if function is None else int(function(*arguments))

    def call(self, name: str, *arguments: object) -> None:
        """Make a call that has to succeed."""
        insist(name, self.ask(name, *arguments))

    def known(self, name: str, *arguments: object, kind: Any = ctypes.c_uint) -> int | None:  # noqa: ANN401
        """A number, None where this card or driver does not tell it."""
        number = kind()
        status = self.ask(name, *arguments, ctypes.byref(number))
        return int(number.value) if status == OK else None

    def number(self, name: str, *arguments: object) -> int:
        """A number that has to be told."""
        found = self.known(name, *arguments)
        if found is None:
            raise CardError(f"the NVIDIA driver does not answer {name}; update it")
        return found

    def text(self, name: str, *at: ctypes.c_void_p) -> str:
        """A text that has to be told."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(name, *at, text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode(errors="replace")

    def processes(self, name: str, at: ctypes.c_void_p) -> tuple[int, list[ProcessInfo]]:
        """Status of a call that lists processes, and what it lists."""
        room = 64
        while True:
            found = (ProcessInfo * room)()
            count = ctypes.c_uint(room)
            status = self.ask(name, at, ctypes.byref(count), found)
            if status != TOO_SMALL:
                return status, list(found[: count.value]) if status == OK else []
            room = count.value + 64


def insist(name: str, status: int) -> None:
    """Raise CardError for a status that is not success."""
    if status != OK:
        hint = _HINTS.get(status, "see what nvidia-smi says")
        raise CardError(f"the NVIDIA driver refuses {name} (NVML status {status}); {hint}")


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
