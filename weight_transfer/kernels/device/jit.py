"""Triton, in the one way in which it is used here.

Parameters of a kernel are annotated as `tl.tensor`, pointers to a tensor's first weight too: Triton
looks annotations up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import triton


class Kernel(Protocol):
    """A compiled function: `kernel[grid](...)` launches it, another kernel just calls it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What runs as many programs."""

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401 -- what Triton makes of it
        """Only inside of another kernel."""


def launched(kernel: Callable[..., Any]) -> Kernel:
    """Return `kernel` as device code; it is compiled anew for each combination of types."""
    return cast("Kernel", triton.jit(kernel))
