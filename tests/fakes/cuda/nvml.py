"""Stand-ins for a GPU's driver: what it would say, chosen by the test. Nothing is measured."""

import ctypes
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rose.nvml import Card, CardError, Client, Usage

CLIENTS = "nvmlDeviceGetComputeRunningProcesses_v3"
MPS_CLIENTS = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
CARD = Card(
    index=0,
    name="Stand-in GPU",
    uuid="GPU-stand-in",
    driver="580.00",
    cuda=(13, 0),
    mig=False,
    compute_mode="default",
    persistence=True,
    memory_bytes=141 << 30,
    power_limit_w=700.0,
    sm_mhz_most=1980,
    memory_mhz_most=3201,
)
IDLE = Usage(
    free_bytes=140 << 30,
    used_bytes=1 << 30,
    processes=(),
    sm_mhz=345,
    memory_mhz=3201,
    power_w=75.0,
    temperature_c=30,
    slowed=(),
)


class StandInReader:
    """CardReader. `looks` are given one after the other; the last one again and again.

    `listed`, `free`: what it says of clients and of free memory, for the test to change; None: it
    does not answer.
    """

    def __init__(self, *cards: Card, looks: Sequence[Usage] = (IDLE,)) -> None:
        self._cards = cards
        self._looks = list(looks)
        self.looked = 0
        self.listed: tuple[Client, ...] | None = ()
        self.free: int | None = IDLE.free_bytes

    def cards(self) -> tuple[Card, ...]:
        return self._cards

    def usage(self, card: Card) -> Usage:
        assert card in self._cards
        self.looked += 1
        return self._looks[min(self.looked, len(self._looks)) - 1]

    def clients(self, card: Card) -> tuple[Client, ...]:
        assert card in self._cards
        if self.listed is None:
            raise CardError("the stand-in does not answer")
        return self.listed

    def free_bytes(self, card: Card) -> int:
        assert card in self._cards
        if self.free is None:
            raise CardError("the stand-in does not answer")
        return self.free


def card(**changes: Any) -> Card:
    return replace(CARD, **changes)


def usage(**changes: Any) -> Usage:
    return replace(IDLE, **changes)


class StandInLibrary:
    """The driver's library, as NVIDIA's bindings open it.

    Every function that would change a card is missing on purpose.
    `answers`: numbers and texts by function, an int below 0 is that status, None an old driver; of
    processes their ids, or pairs of id and bytes.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "nvmlInitWithFlags": 0,
            "nvmlDeviceGetCount_v2": 1,
            "nvmlDeviceGetHandleByIndex_v2": 7,
            "nvmlDeviceGetName": "Stand-in GPU",
            "nvmlDeviceGetUUID": "GPU-stand-in",
            "nvmlSystemGetDriverVersion": "580.00",
            "nvmlSystemGetCudaDriverVersion_v2": 13_000,
            "nvmlDeviceGetMigMode": 0,
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetComputeMode": 0,
            "nvmlDeviceGetMemoryInfo": (141 << 30, 140 << 30, 1 << 30),
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetPowerUsage": 75_000,
            "nvmlDeviceGetClockInfo": {1: 345, 2: 3201},
            "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 3201},
            "nvmlDeviceGetTemperature": {0: 30},
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1,
            CLIENTS: (),
            MPS_CLIENTS: -3,
        } | answers

    def __getattr__(self, name: str) -> Callable[..., int]:
        answer = self.answers.get(name)
        if answer is None:
            raise AttributeError(name)
        if name in (CLIENTS, MPS_CLIENTS) and isinstance(answer, tuple):
            return lambda at, count, room: _processes(answer, count._obj, room)
        return lambda *arguments: _answer(answer, arguments)


def bindings_of(open_library: Callable[[str], object]) -> Any:
    """NVIDIA's own bindings, which open the library so. Loaded anew: they keep what they opened."""
    with patch.dict(sys.modules):
        sys.modules.pop("pynvml", None)
        bindings: Any = importlib.import_module("pynvml")
    bindings.CDLL = open_library
    return bindings


def _answer(answer: Any, arguments: tuple[Any, ...]) -> int:
    if isinstance(answer, int) and answer < 0:
        return -answer
    targets = [argument._obj for argument in arguments if hasattr(argument, "_obj")]
    if isinstance(answer, str):
        assert arguments[-1].value >= len(answer)
        arguments[-2].value = answer.encode()
    elif isinstance(answer, dict):
        targets[0].value = answer[arguments[-2].value]
    elif isinstance(answer, tuple):
        targets[0].total, targets[0].free, targets[0].used = answer
    elif targets:
        targets[0].value = answer
    return 0


def _processes(listed: tuple[Any, ...], count: ctypes.c_uint, room: Any) -> int:
    """`listed`: process ids, or pairs of them with bytes."""
    if len(listed) > count.value:
        count.value = len(listed)
        return 7
    for at, entry in enumerate(listed):
        pid, used = entry if isinstance(entry, tuple) else (entry, 0)
        room[at].pid, room[at].usedGpuMemory = pid, used
    count.value = len(listed)
    return 0
