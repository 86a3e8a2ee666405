"""Memory of a device that an update takes for a while: how it is refused, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weight_transfer.errors import DeviceMemoryError

if TYPE_CHECKING:
    import torch


@contextmanager
def named_shortage(device: torch.device, what: str) -> Iterator[None]:
    """Raise DeviceMemoryError, one line, where `what` finds no room; nothing is written then."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        shortage = str(error).splitlines()[0]
        release_unused(device)
        raise DeviceMemoryError(
            f"{device} has no room for {what}; nothing was written, free memory there and send it"
            f" again ({shortage})"
        ) from error


def release_unused(device: torch.device) -> None:
    """Give memory that nothing uses any more back: torch would keep it for this process."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
