"""Hosts in a shared folder: real pages and descriptions, stand-in engines."""

from pathlib import Path

from executor import ControlPage
from executor.control_page.host_description import HostDescription
from tests.harness.seated_host import SeatedHost


class FolderHost:
    """A host that made its page in a folder, took the seat and described itself."""

    def __init__(self, folder: Path, name: str, *devices: str, ttft_s: float = 0.5) -> None:
        self.path = folder / f"{name}.page"
        self.page = ControlPage.ensure(self.path)
        self.host = SeatedHost(self.page)
        self.host.tell()
        self.said = HostDescription("chat", ttft_s, 0.0, devices, self.host.seat.taken_ns)
        self.said.write(self.path)

    def close(self) -> None:
        """End it: the kernel frees its seat."""
        self.host.close()
        self.page.close()
