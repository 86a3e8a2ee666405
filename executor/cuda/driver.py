"""The few calls of a GPU's driver that KV pages need.

    reserve ─> addresses ── map(handle) ──> mapped ── set_access ──> usable ── unmap ──> addresses
    create | import_handle ─> handle ── release ──> freed once no mapping and no process has it

Every call raises DeviceError; those that need memory raise DeviceMemoryShort when there is none.
"""

from __future__ import annotations

import os
from typing import Any, Final, NewType

from executor.errors import DeviceError, DeviceMemoryShort

_ZERO_FLAGS: Final = 0

Handle = NewType("Handle", int)
"""Physical memory on a GPU as this process names it; one page in everything built on a driver."""


class Driver:
    """CUDA driver calls for one device, in one process. Addresses, sizes and granularity are bytes.

    Calls come from the thread that opened it, or from one in which the device's primary context,
    torch's own, is current. `device`: its 16-byte UUID, the same in every process. `granularity`:
    unit of sizes and addresses of physical memory.
    """

    def __init__(self, cuda: Any, ordinal: int) -> None:  # noqa: ANN401 -- a module without types
        """Open the device `ordinal` and make its primary context current; see `open_driver`.

        cuda: the module `cuda.bindings.driver`. Raises DeviceError.
        """
        self._cuda = cuda
        self._call("cuInit", _ZERO_FLAGS)
        self._ordinal = self._call("cuDeviceGet", ordinal)
        # Torch uses the primary context, too; it ends with the process.
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._ordinal))
        attribute = cuda.CUdevice_attribute
        for name in ("VIRTUAL_MEMORY_MANAGEMENT", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"):
            number = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}_SUPPORTED")
            if not self._call("cuDeviceGetAttribute", number, self._ordinal):
                raise DeviceError(f"GPU {ordinal} has no {name}: use ROSE_KV_BACKEND=auto")
        self._properties = self._allocation(ordinal)
        self._access = self._read_write(ordinal)
        self._stream = self._call("cuStreamCreate", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(
            self._call("cuMemGetAllocationGranularity", self._properties, minimum)
        )
        self.device = bytes(self._call("cuDeviceGetUuid", self._ordinal).bytes)

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes of addresses, still without memory; return the first address."""
        return int(self._call("cuMemAddressReserve", size, self.granularity, 0, _ZERO_FLAGS))

    def unreserve(self, address: int, size: int) -> None:
        """Free a whole reservation of addresses; nothing may be mapped in it."""
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> Handle:
        """Allocate exportable physical memory of undefined content; return its handle."""
        return Handle(int(self._call("cuMemCreate", size, self._properties, _ZERO_FLAGS)))

    def release(self, handle: Handle) -> None:
        """Release a handle; the memory is freed with its last mapping and last handle anywhere."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: Handle) -> None:
        """Map the whole of a handle's memory at reserved addresses that have none."""
        self._call("cuMemMap", address, size, 0, handle, _ZERO_FLAGS)

    def unmap(self, address: int, size: int) -> None:
        """Undo exactly one `map` at this address and size."""
        self._call("cuMemUnmap", address, size)

    def set_access(self, address: int, size: int) -> None:
        """Let this device read and write a run of mappings, all of it mapped."""
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def export_handle(self, handle: Handle) -> int:
        """Return a file descriptor of the memory for another process; the caller closes it."""
        return int(
            self._call("cuMemExportToShareableHandle", handle, self._descriptors, _ZERO_FLAGS)
        )

    def import_handle(self, descriptor: int) -> Handle:
        """Return a handle of another process's memory; the descriptor stays the caller's."""
        handle = self._call("cuMemImportFromShareableHandle", descriptor, self._descriptors)
        return Handle(int(handle))

    def free_bytes(self) -> int:
        free, _total = self._call("cuMemGetInfo")
        return int(free)

    def fill(self, address: int, value: int, size: int) -> None:
        """Begin to write one byte value over usable memory; `synchronize` waits for the end."""
        self._call("cuMemsetD8Async", address, value, size, self._stream)

    def synchronize(self) -> None:
        """Wait until every `fill` has ended."""
        self._call("cuStreamSynchronize", self._stream)

    @property
    def _descriptors(self) -> Any:  # noqa: ANN401 -- an enumeration without types
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _allocation(self, ordinal: int) -> Any:  # noqa: ANN401 -- a structure without types
        cuda = self._cuda
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        properties.requestedHandleTypes = self._descriptors
        return properties

    def _read_write(self, ordinal: int) -> Any:  # noqa: ANN401 -- a structure without types
        cuda = self._cuda
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 -- what the driver takes
        """Return the result of a driver call: None, one value, or a tuple. Raises DeviceError."""
        code, *values = getattr(self._cuda, name)(*arguments)
        results = self._cuda.CUresult
        if code == results.CUDA_ERROR_OUT_OF_MEMORY:
            raise DeviceMemoryShort(f"{name}: the GPU is out of memory; it may come back")
        if code != results.CUDA_SUCCESS:
            label = getattr(code, "name", code)
            raise DeviceError(f"{name} failed with {label}; the engine's log has what came before")
        return values[0] if len(values) == 1 else tuple(values) or None


def open_driver(ordinal: int = 0) -> Driver:
    """Return the driver of the process's GPU `ordinal`, whose primary context becomes current.

    Raises DeviceError without a driver, such a GPU or the package `cuda-bindings`.
    """
    try:
        from cuda.bindings import driver as cuda
    except ImportError:
        raise DeviceError(
            "KV pages on a GPU need the package cuda-bindings: install rose-rollout[cuda]"
        ) from None
    try:
        return Driver(cuda, ordinal)
    except (RuntimeError, OSError) as error:
        # The bindings raise this if the driver's library, or a function in it, is missing.
        where = os.environ.get("LD_LIBRARY_PATH", "")
        raise DeviceError(
            f"no usable NVIDIA driver (LD_LIBRARY_PATH={where!r}): {str(error).splitlines()[0]}"
        ) from error
