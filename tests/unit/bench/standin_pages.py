"""Stand-in for a driver's virtual memory: pages are files in memory, handles are descriptors.

It keeps the driver's rules, across processes too, and takes no time that means anything.
"""

import os
import sys

PAGE_BYTES = 64 << 10
MARK_BYTES = 8


class StandInPages:
    granularity = PAGE_BYTES

    def __init__(self) -> None:
        self.next_address = PAGE_BYTES
        self.reserved: dict[int, int] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.usable: set[int] = set()
        self.calls: list[str] = []

    def reserve(self, size: int) -> int:
        address = self.next_address
        self.next_address += size
        self.reserved[address] = size
        return address

    def unreserve(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not [a for a in self.mapped if address <= a < address + size], "still mapped"

    def create(self, size: int) -> int:
        assert size == PAGE_BYTES
        self.calls.append("create")
        handle = os.memfd_create("page")
        os.pwrite(handle, b"\xaa" * MARK_BYTES, 0)
        self.handles.add(handle)
        return handle

    def release(self, handle: int) -> None:
        self.handles.remove(handle)
        os.close(handle)

    def map(self, address: int, size: int, handle: int) -> None:
        assert size == PAGE_BYTES
        assert address not in self.mapped, "mapped already"
        assert handle in self.handles
        assert any(a <= address < a + n for a, n in self.reserved.items()), "not reserved"
        self.calls.append("map")
        self.mapped[address] = os.dup(handle)

    def unmap(self, address: int, size: int) -> None:
        assert size == PAGE_BYTES, "one map is undone at a time"
        os.close(self.mapped.pop(address))
        self.usable.discard(address)

    def set_access(self, address: int, size: int) -> None:
        run = range(address, address + size, PAGE_BYTES)
        assert all(at in self.mapped for at in run), "not mapped"
        self.calls.append(f"access {len(run)}")
        self.usable.update(run)

    def export_handle(self, handle: int) -> int:
        assert handle in self.handles
        return os.dup(handle)

    def import_handle(self, descriptor: int) -> int:
        handle = os.dup(descriptor)
        self.handles.add(handle)
        return handle

    def fill(self, address: int, value: int, size: int) -> None:
        for at in range(address, address + size, PAGE_BYTES):
            assert at in self.usable, "a fault on the card"
            os.pwrite(self.mapped[at], bytes([value]) * MARK_BYTES, 0)

    def synchronize(self) -> None:
        self.calls.append("synchronize")


OPENED: list[StandInPages] = []


def open_pages() -> StandInPages:
    OPENED.append(StandInPages())
    return OPENED[-1]


def open_only_for_the_host() -> StandInPages:
    if "page_guest" in sys.argv[0]:
        raise RuntimeError("no memory for a guest")
    return open_pages()
