"""A GPU and its driver that keep the rules and do nothing else.

Several StandInDrivers on one StandInDevice are several processes on one GPU: memory is freed when
no mapping and no handle of any of them is left.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from executor.cuda.driver import Handle
from executor.errors import DeviceError, DeviceMemoryShort

PAGE = 2 << 20
GARBAGE = 0xAA
"""Content of fresh memory: code that forgets to zero it reads this."""


@dataclass(eq=False)
class Physical:
    """Memory of the device; `written` over `filled`."""

    size: int
    users: int = 0
    filled: int = GARBAGE
    written: dict[int, int] = field(default_factory=dict)


@dataclass
class Mapped:
    size: int
    memory: Physical
    usable: bool = False


class StandInDevice:
    def __init__(self, total_bytes: int, granularity: int = PAGE) -> None:
        self.total_bytes = total_bytes
        self.granularity = granularity
        self.used_bytes = 0
        self.uuid = os.urandom(16)
        self.exported: dict[tuple[int, int], Physical] = {}

    def allocate(self, size: int) -> Physical:
        if self.used_bytes + size > self.total_bytes:
            raise DeviceMemoryShort("the stand-in's device is full")
        self.used_bytes += size
        return Physical(size)

    def drop(self, memory: Physical) -> None:
        memory.users -= 1
        if memory.users == 0:
            self.used_bytes -= memory.size


class StandInDriver:
    """One process's driver. `fails`: asked before each call, with its name and how many calls of
    that name came before; raises what the call is to raise."""

    def __init__(self, device: StandInDevice) -> None:
        self._gpu = device
        self.fails: Callable[[str, int], None] = lambda _name, _number: None
        self.calls: Counter[str] = Counter()
        self.handles: dict[Handle, Physical] = {}
        self.mapped: dict[int, Mapped] = {}
        self.reserved: dict[int, int] = {}
        self._next_handle = 1
        self._next_address = 1 << 40
        self._unsynchronized = False

    @property
    def device(self) -> bytes:
        return self._gpu.uuid

    @property
    def granularity(self) -> int:
        return self._gpu.granularity

    def reserve(self, size: int) -> int:
        self._begin("reserve")
        self._aligned(size)
        address = self._next_address
        self._next_address += size + self.granularity
        self.reserved[address] = size
        return address

    def unreserve(self, address: int, size: int) -> None:
        self._begin("unreserve")
        self._check(self.reserved.get(address) == size, "that is not a whole reservation")
        within = any(address <= at < address + size for at in self.mapped)
        self._check(not within, "memory is still mapped in the reservation")
        del self.reserved[address]

    def create(self, size: int) -> Handle:
        self._begin("create")
        self._aligned(size)
        return self._handle_of(self._gpu.allocate(size))

    def release(self, handle: Handle) -> None:
        self._begin("release")
        self._gpu.drop(self._memory(handle))
        del self.handles[handle]

    def map(self, address: int, size: int, handle: Handle) -> None:
        self._begin("map")
        self._aligned(address, size)
        memory = self._memory(handle)
        self._check(memory.size == size, "a handle is mapped whole")
        inside = any(at <= address and address + size <= at + n for at, n in self.reserved.items())
        self._check(inside, "the address is not reserved")
        free = all(
            address + size <= at or at + old.size <= address for at, old in self.mapped.items()
        )
        self._check(free, "something is mapped there already")
        memory.users += 1
        self.mapped[address] = Mapped(size, memory)

    def unmap(self, address: int, size: int) -> None:
        self._begin("unmap")
        old = self.mapped.get(address)
        self._check(old is not None and old.size == size, "that is not a whole mapping")
        self._check(not self._unsynchronized, "a fill is still under way")
        self._gpu.drop(self.mapped.pop(address).memory)

    def set_access(self, address: int, size: int) -> None:
        self._begin("set_access")
        for mapped in self._run(address, size):
            mapped.usable = True

    def export_handle(self, handle: Handle) -> int:
        self._begin("export_handle")
        descriptor = os.memfd_create("physical")
        self._gpu.exported[_inode(descriptor)] = self._memory(handle)
        return descriptor

    def import_handle(self, descriptor: int) -> Handle:
        self._begin("import_handle")
        memory = self._gpu.exported.get(_inode(descriptor))
        if memory is None or memory.users == 0:
            raise DeviceError("stand-in: the descriptor is of no memory on this device")
        return self._handle_of(memory)

    def free_bytes(self) -> int:
        self._begin("free_bytes")
        return self._gpu.total_bytes - self._gpu.used_bytes

    def fill(self, address: int, value: int, size: int) -> None:
        self._begin("fill")
        for mapped in self._run(address, size):
            self._check(mapped.usable, "memory is written to without access")
            mapped.memory.filled = value
            mapped.memory.written.clear()
        self._unsynchronized = True

    def synchronize(self) -> None:
        self._begin("synchronize")
        self._unsynchronized = False

    # A kernel, and the end of a process.

    def write(self, address: int, data: bytes) -> None:
        mapped, at = self._byte(address)
        if at + len(data) <= mapped.size:
            mapped.memory.written.update(enumerate(data, at))
            return
        for offset, byte in enumerate(data):
            mapped, at = self._byte(address + offset)
            mapped.memory.written[at] = byte

    def read(self, address: int, size: int) -> bytes:
        assert not self._unsynchronized, "memory is read while it is being filled"
        mapped, at = self._byte(address)
        if at + size <= mapped.size:
            written, filled = mapped.memory.written, mapped.memory.filled
            return bytes([written.get(offset, filled) for offset in range(at, at + size)])
        found = bytearray()
        for offset in range(size):
            mapped, at = self._byte(address + offset)
            found.append(mapped.memory.written.get(at, mapped.memory.filled))
        return bytes(found)

    def die(self) -> None:
        """The process ends: all that it has goes, in whatever state."""
        for memory in (*self.handles.values(), *(old.memory for old in self.mapped.values())):
            self._gpu.drop(memory)
        self.handles.clear()
        self.mapped.clear()
        self.reserved.clear()

    @property
    def is_clean(self) -> bool:
        """True if nothing is reserved, mapped or held."""
        return not (self.reserved or self.mapped or self.handles)

    def _begin(self, name: str) -> None:
        number = self.calls[name]
        self.calls[name] += 1
        self.fails(name, number)

    def _handle_of(self, memory: Physical) -> Handle:
        handle = Handle(self._next_handle)
        self._next_handle += 1
        self.handles[handle] = memory
        memory.users += 1
        return handle

    def _memory(self, handle: Handle) -> Physical:
        self._check(handle in self.handles, "there is no such handle")
        return self.handles[handle]

    def _run(self, address: int, size: int) -> list[Mapped]:
        self._aligned(address, size)
        found = []
        at = address
        while at < address + size:
            mapped = self.mapped.get(at)
            self._check(mapped is not None, "the range is not mapped throughout")
            assert mapped is not None
            found.append(mapped)
            at += mapped.size
        self._check(at == address + size, "the range ends within a mapping")
        return found

    def _byte(self, address: int) -> tuple[Mapped, int]:
        start = address - address % self.granularity
        if start in self.mapped:
            assert self.mapped[start].usable, "memory is used without access: the engine would end"
            return self.mapped[start], address - start
        for at, mapped in self.mapped.items():
            if at <= address < at + mapped.size:
                assert mapped.usable, "memory is used without access: the engine would end"
                return mapped, address - at
        raise AssertionError(f"nothing is mapped at {address:#x}: the engine would end")

    def _aligned(self, *numbers: int) -> None:
        whole = all(number > 0 and number % self.granularity == 0 for number in numbers)
        self._check(whole, f"{numbers} are not multiples of {self.granularity}")

    @staticmethod
    def _check(rule: bool, broken: str) -> None:
        if not rule:
            raise DeviceError(f"stand-in: {broken}")


def _inode(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def scripted(
    name: str, number: int, error: type[DeviceError] = DeviceMemoryShort
) -> Callable[[str, int], None]:
    """A script that fails the call `name` that comes after `number` others of that name."""

    def fails(called: str, before: int) -> None:
        if called == name and before == number:
            raise error(f"stand-in: {name} fails by script")

    return fails
