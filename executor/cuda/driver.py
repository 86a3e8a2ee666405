"""The few calls of a GPU's driver that KV pages need.

    reserve ─> addresses ── map(handle) ──> mapped ── set_access ──> usable ── unmap ──> addresses
    create | import_handle ─> handle ── release ──> freed once no mapping and no process has it

Every call raises DeviceError; those that need memory raise DeviceMemoryShort when there is none.
"""

from typing import NewType, Protocol

Handle = NewType("Handle", int)
"""Physical memory as this process names it; one page in everything built on a driver."""


class Driver(Protocol):
    """One device, in one process. Addresses, sizes and the granularity are bytes."""

    @property
    def device(self) -> bytes:
        """The device's 16-byte UUID: the same in every process."""
        ...

    @property
    def granularity(self) -> int:
        """Unit of sizes and addresses of physical memory."""
        ...

    def reserve(self, size: int) -> int:
        """Reserve addresses and return the first; they have no memory yet."""
        ...

    def unreserve(self, address: int, size: int) -> None:
        """Give a whole reservation back; nothing may be mapped in it."""
        ...

    def create(self, size: int) -> Handle:
        """Allocate physical memory that can be exported. Its content is undefined."""
        ...

    def release(self, handle: Handle) -> None:
        """Release a handle. The memory is freed with its last mapping and last handle anywhere."""
        ...

    def map(self, address: int, size: int, handle: Handle) -> None:
        """Map the whole of a handle's memory at reserved addresses that have none."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Undo exactly one `map`."""
        ...

    def set_access(self, address: int, size: int) -> None:
        """Let this device read and write a run of mappings, all of it mapped."""
        ...

    def export_handle(self, handle: Handle) -> int:
        """Return a file descriptor that another process can import; the caller closes it."""
        ...

    def import_handle(self, descriptor: int) -> Handle:
        """Return a handle of another process's memory; the descriptor stays the caller's."""
        ...

    def free_bytes(self) -> int:
        """Return the device's free memory as the driver measures it."""
        ...

    def fill(self, address: int, value: int, size: int) -> None:
        """Write one byte value over usable memory, some time before `synchronize` returns."""
        ...

    def synchronize(self) -> None:
        """Wait for every `fill`."""
        ...
