"""Triton, in the one way in which it is used here.

Parameters of a kernel are annotated as `tl.tensor`, pointers to a tensor's first weight too: Triton
looks annotations up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, overload

import triton


class Kernel(Protocol):
    """A compiled function: `kernel[grid](...)` launches it, another kernel just calls it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What runs as many programs."""

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401 -- what Triton makes of it
        """Only inside of another kernel."""


@overload
def launched(kernel: Callable[..., Any]) -> Kernel: ...
@overload
def launched(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Kernel]: ...


def launched(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return `kernel` as device code; it is compiled anew for each combination of types.

    And of alignments, but for what `do_not_specialize` names.
    """
    return cast("Kernel", triton.jit(kernel, **options))
