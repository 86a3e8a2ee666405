"""Reader of NVIDIA cards through NVML, the driver's management library, by NVIDIA's own bindings.

The library comes with the driver. The bindings (`pynvml`, of the package nvidia-ml-py) are imported
on first use: a machine without a GPU does not need them, and a Python that only measures may lack
them. They are only read from: no setting, no reset.

`card_of` finds a card by index or UUID, and `insist_usable` checks whether ROSE can work on it.

RoseError
└── CardError     no driver, no such card, or one that cannot be used now; nothing was changed
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rose.errors import RoseError


@dataclass(frozen=True, slots=True)
class Card:
    """Fixed properties of a GPU. None: the card does not report the value.

    cuda: highest CUDA version (major, minor) that the driver serves. sm_mhz_most, memory_mhz_most:
    highest clocks.
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
    """Load of a GPU at one moment. slowed: reasons for reduced clocks. None: the card does not
    report the value.

    processes: ids of the processes that compute on it, in the driver's numbering: in a container
    they may belong to another namespace, or be hidden.
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
    """Process that computes on a GPU. pid: in the driver's numbering, see `Usage.processes`.

    memory_bytes: GPU memory that it uses, None if the driver does not report it. mps: it computes
    through MPS.
    """

    pid: int
    memory_bytes: int | None
    mps: bool = False


class CardReader(Protocol):
    """Protocol of a reader of this machine's GPUs, through their driver."""

    def cards(self) -> tuple[Card, ...]:
        """Return all GPUs of the machine. Raises CardError without a driver that answers."""
        ...

    def usage(self, card: Card) -> Usage:
        """Return a GPU's memory, clocks, power and processes at this moment. Raises CardError."""
        ...

    def clients(self, card: Card) -> tuple[Client, ...]:
        """Return the processes that compute on a GPU, with the memory of each. Raises CardError."""
        ...

    def free_bytes(self, card: Card) -> int:
        """Return the free memory of a GPU, in bytes. Raises CardError."""
        ...


class CardError(RoseError):
    """Error: a GPU cannot be used, or its driver does not answer."""


def card_of(cards: tuple[Card, ...], device: int | str) -> Card:
    """Return the card whose index is the int `device`, or whose UUID begins with the text `device`.

    Raises CardError if there is none, or more than one.
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
    """Raise CardError, with what to do, if ROSE cannot run on a card: an old driver, MIG, or
    compute mode prohibited.
    """
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
    """Return a version as `12.8`; `unknown` for (0, 0)."""
    return "unknown" if version == (0, 0) else f"{version[0]}.{version[1]}"


NO_LIBRARY, NO_DRIVER, UNKNOWN_CALL, VERSIONS_DIFFER = 12, 9, 13, 18
_HINTS = {
    NO_DRIVER: "load the NVIDIA driver (is the kernel module there?)",
    UNKNOWN_CALL: "the driver is too old to know it; update it",
    VERSIONS_DIFFER: "the driver was updated under a running kernel module; its owner must reload",
}
# Names by nvmlComputeMode_t.
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
# Names by bit of nvmlClocksEventReasons.
SLOWED_BY = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


def load_bindings() -> Any:  # noqa: ANN401 -- the package has no types
    """Import and return NVIDIA's module `pynvml`. Raises CardError if the package is missing."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise CardError(
            "NVIDIA cards are read through the package nvidia-ml-py, which this Python does not"
            " have; pip install nvidia-ml-py"
        ) from error
    return pynvml


class Nvml:
    """Reader of this machine's GPUs by NVIDIA's bindings. Any thread may use it."""

    def __init__(self, load: Callable[[], Any] = load_bindings) -> None:
        """Load and initialize the driver's library. Raises CardError without bindings or driver."""
        self._nvml = load()
        self._told(self._nvml.nvmlInit)

    def cards(self) -> tuple[Card, ...]:
        """Return all GPUs of the machine, in the driver's order. Raises CardError."""
        count = self._told(self._nvml.nvmlDeviceGetCount)
        return tuple(self._card(index) for index in range(count))

    def usage(self, card: Card) -> Usage:
        """Return a GPU's memory, clocks, power and processes at this moment. Raises CardError."""
        nvml, known = self._nvml, self._known
        at = self._handle(card.index)
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo, at)
        power_mw = known(nvml.nvmlDeviceGetPowerUsage, at)
        slowed = known(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, at) or 0
        return Usage(
            free_bytes=memory.free,
            used_bytes=memory.used,
            processes=tuple(client.pid for client in self._clients(at)),
            sm_mhz=known(nvml.nvmlDeviceGetClockInfo, at, nvml.NVML_CLOCK_SM),
            memory_mhz=known(nvml.nvmlDeviceGetClockInfo, at, nvml.NVML_CLOCK_MEM),
            power_w=None if power_mw is None else power_mw / 1e3,
            temperature_c=known(nvml.nvmlDeviceGetTemperature, at, nvml.NVML_TEMPERATURE_GPU),
            slowed=tuple(why for bit, why in SLOWED_BY.items() if slowed & bit),
        )

    def clients(self, card: Card) -> tuple[Client, ...]:
        """Return the processes that compute on a GPU, with the memory of each. Raises CardError."""
        return self._clients(self._handle(card.index))

    def free_bytes(self, card: Card) -> int:
        """Return the free memory of a GPU, in bytes. Raises CardError."""
        return int(self._told(self._nvml.nvmlDeviceGetMemoryInfo, self._handle(card.index)).free)

    def _card(self, index: int) -> Card:
        nvml, told, known = self._nvml, self._told, self._known
        at = self._handle(index)
        # Some users may not read the memory of a partitioned card, which `insist_usable` refuses.
        memory = known(nvml.nvmlDeviceGetMemoryInfo, at)
        version = known(nvml.nvmlSystemGetCudaDriverVersion_v2) or 0
        limit_mw = known(nvml.nvmlDeviceGetEnforcedPowerLimit, at)
        persistence = known(nvml.nvmlDeviceGetPersistenceMode, at)
        mode = known(nvml.nvmlDeviceGetComputeMode, at) or 0
        # A card without MIG answers that it does not know the question.
        mig, _pending = known(nvml.nvmlDeviceGetMigMode, at) or (0, 0)
        return Card(
            index=index,
            name=told(nvml.nvmlDeviceGetName, at),
            uuid=told(nvml.nvmlDeviceGetUUID, at),
            driver=told(nvml.nvmlSystemGetDriverVersion),
            cuda=(version // 1000, version % 1000 // 10),
            mig=bool(mig),
            compute_mode=COMPUTE_MODES.get(mode, "unknown"),
            persistence=None if persistence is None else bool(persistence),
            memory_bytes=0 if memory is None else memory.total,
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            sm_mhz_most=known(nvml.nvmlDeviceGetMaxClockInfo, at, nvml.NVML_CLOCK_SM),
            memory_mhz_most=known(nvml.nvmlDeviceGetMaxClockInfo, at, nvml.NVML_CLOCK_MEM),
        )

    def _handle(self, index: int) -> object:
        return self._told(self._nvml.nvmlDeviceGetHandleByIndex, index)

    def _clients(self, at: object) -> tuple[Client, ...]:
        """Return the processes that compute on a GPU.

        Clients of MPS may be in either of the driver's two lists or in both.
        """
        nvml = self._nvml
        # Call a versioned name: others raise another error if the driver is too old.
        listed = self._told(nvml.nvmlDeviceGetComputeRunningProcesses_v3, at)
        # Drivers and cards without MPS do not know this question.
        below_mps = self._known(nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, at) or ()
        memory: dict[int, int | None] = {}
        for info in (*listed, *below_mps):
            # Each client has at least a context, so 0 means that the driver cannot tell.
            memory[info.pid] = max(memory.get(info.pid) or 0, info.usedGpuMemory or 0) or None
        mps = {info.pid for info in below_mps}
        return tuple(Client(pid, used, pid in mps) for pid, used in memory.items())

    def _told(self, ask: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        """Return the driver's answer to a call that has to succeed. Raises CardError."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as error:
            raise CardError(_refusal(ask.__name__, error)) from error

    def _known(self, ask: Callable[..., Any], *arguments: object) -> Any | None:  # noqa: ANN401
        """Return the driver's answer to a call; None if this card or driver does not give it."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError:
            return None


def _refusal(name: str, error: Any) -> str:  # noqa: ANN401
    """Return one line that says what to do about an NVMLError. name: the refused call."""
    if error.value == NO_LIBRARY:
        return (
            "no NVIDIA driver is here (libnvidia-ml.so.1 cannot be opened);"
            " run on a machine with an NVIDIA GPU and its driver"
        )
    hint = _HINTS.get(error.value, "see what nvidia-smi says")
    return f"the NVIDIA driver refuses {name} (NVML status {error.value}: {error}); {hint}"
