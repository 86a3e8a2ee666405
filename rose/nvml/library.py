"""NVIDIA's management library, called through ctypes.

It comes with every driver; a Python package for it does not.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from rose.nvml.errors import CardError

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
