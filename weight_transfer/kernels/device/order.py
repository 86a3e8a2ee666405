"""What happens on a device beside its engine's work, and what only when that has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Order(Protocol):
    """Of one device, as one thread uses it."""

    def aside(self) -> AbstractContextManager[None]:
        """What is begun inside runs beside the engine's steps, and has ended when this does."""

    def settle(self) -> None:
        """Wait for all that this process has begun on the device."""


class CudaOrder:
    """A stream of its own; streams wait for each other at pauses only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is begun inside runs beside the engine's steps, and has ended when this does."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def settle(self) -> None:
        """Wait for all that this process has begun on the device."""
        torch.cuda.synchronize(self._device)


class HostOrder:
    """Of host memory, in Triton's interpreter: everything has ended when it returns."""

    def aside(self) -> AbstractContextManager[None]:
        """Nothing runs beside anything."""
        return nullcontext()

    def settle(self) -> None:
        """Nothing is under way."""


def order_of(device: torch.device) -> Order:
    """The order of things on a device."""
    return CudaOrder(device) if device.type == "cuda" else HostOrder()
