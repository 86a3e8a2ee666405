"""Numba, in the one way in which it is used here: compiled on first use, kept on disk, no GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.binding.ffi
import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(kernel: Kernel) -> Kernel:
    """Return `kernel` as machine code; it is compiled anew for each combination of types."""
    return cast("Kernel", numba.njit(nogil=True, cache=True)(kernel))


def _mend_llvmlite() -> None:
    """Let llvmlite's handle of its library have no `__dict__`.

    It answers for every name with a function of the library, `__dict__` included (0.47). vLLM looks
    into all objects of all modules when a CPU worker starts (0.32), and would die of it.
    """
    handle = type(llvmlite.binding.ffi.lib)
    find = handle.__getattr__

    def named(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    handle.__getattr__ = named


_mend_llvmlite()
