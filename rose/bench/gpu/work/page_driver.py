"""What the piece `pages` asks of a GPU's driver. Sizes and addresses are bytes.

The CUDA memory backend's driver answers it; this piece knows nothing else of that.
"""

import importlib
from typing import Protocol, cast

from rose.bench.gpu.modules import absent

# `module:function` that opens the driver of the process's first GPU.
OPENER = "executor.cuda.bindings:open_driver"


class PageDriver(Protocol):
    """One device in one process; every call raises when the driver refuses."""

    @property
    def granularity(self) -> int:
        """Size of the pages that physical memory comes in."""
        ...

    def reserve(self, size: int) -> int:
        """Reserve addresses; returns the first."""
        ...

    def unreserve(self, address: int, size: int) -> None:
        """Give a whole reservation back, with nothing mapped in it."""
        ...

    def create(self, size: int) -> int:
        """Take physical memory from the card; returns its handle."""
        ...

    def release(self, handle: int) -> None:
        """Forget a handle; the memory goes with its last handle and mapping anywhere."""
        ...

    def map(self, address: int, size: int, handle: int) -> None:
        """Put a handle's memory at reserved addresses."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Undo exactly one `map`."""
        ...

    def set_access(self, address: int, size: int) -> None:
        """Let the card read and write a run of mappings."""
        ...

    def export_handle(self, handle: int) -> int:
        """Return a file descriptor for another process; the caller closes it."""
        ...

    def import_handle(self, descriptor: int) -> int:
        """Return a handle of another process's memory; the descriptor stays the caller's."""
        ...

    def fill(self, address: int, value: int, size: int) -> None:
        """Write one byte value over usable memory, before `synchronize` returns."""
        ...

    def synchronize(self) -> None:
        """Wait for every `fill`."""
        ...


def lacking() -> str:
    """Why pages cannot be moved, empty when they can."""
    return "needs the CUDA memory backend" if absent([OPENER.partition(":")[0]]) else ""


def opened(opener: str) -> PageDriver:
    """The driver that `module:function` opens in this process."""
    module, _, function = opener.partition(":")
    return cast("PageDriver", getattr(importlib.import_module(module), function)())
