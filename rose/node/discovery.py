"""Discovery of hosts in a shared folder: who is there, who came, who left.

    FOLDER/NAME.page         a host of this machine
    FOLDER/POD/NAME.page     a host in a pod that sees no folder but its own

A host is there while a process holds the seat of its page and has described itself since it took
it. `look` reads the folder, with suspicion: several users may write there. What it cannot use is no
host, so it gets no guest. `HostBook` is the state machine of what follows from a look:

    found ──► HostFound       gone for GONE_LOOKS, or another life of it ──► HostLost
    unusable for REFUSED_LOOKS ──► PageRefused, once for each reason
    a page that nobody uses for DEAD_LOOKS ──► PageDead: it is memory, and pods have ever new names
"""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final

from executor import ControlPage, PageError
from executor.control_page.host_description import SUFFIX, HostDescription, host_name
from executor.control_page.host_seat import SEAT, inode_of, is_held, is_in_use
from executor.control_page.page import MAGIC, check_folder
from rose.node.config import DiscoverConfig, HostConfig

LOOK_S: Final = 1.0
GONE_LOOKS: Final = 3
# A host that starts describes itself a moment after its page is there.
REFUSED_LOOKS: Final = 2
DEAD_LOOKS: Final = 600
MOST_ENTRIES: Final = 1_024
MOST_REFUSED: Final = 64


@dataclass(frozen=True, slots=True)
class FoundHost:
    """One host that a scan found, from the start of its process to its end.

    inode: device and inode of its control page. said: its own description. alone: True if no other
    host uses its GPUs, so that it may have a guest.
    """

    name: str
    page: Path
    inode: tuple[int, int]
    said: HostDescription
    alone: bool = True

    def config(self, discover: DiscoverConfig) -> HostConfig:
        """Return the host's configuration: its GPUs, and its own latency targets where it states
        them.
        """
        return HostConfig(
            page=self.page,
            name=self.name,
            page_group=discover.page_group,
            ttft_target_s=self.said.ttft_s or discover.ttft_target_s,
            tpot_target_s=self.said.tpot_s or discover.tpot_target_s,
            headroom_bytes=discover.headroom_bytes,
            devices=self.said.devices,
            step_profile=discover.step_profile,
        )


@dataclass(frozen=True, slots=True)
class FolderScan:
    """Result of one scan of the folder: hosts by name, unusable pages with the reason, and dead
    pages with their inode.

    dead: pages that no process uses.
    """

    hosts: Mapping[str, FoundHost] = field(default_factory=dict)
    unusable: Mapping[Path, str] = field(default_factory=dict)
    dead: Mapping[Path, tuple[int, int]] = field(default_factory=dict)


def look(folder: Path, group: str = "") -> FolderScan:
    """Scan the folder and the folders right below it, and return the hosts and unusable pages; no
    content of the folder makes it raise.
    """
    try:
        check_folder(folder)
    except PageError as error:
        return FolderScan(unusable={folder: str(error)})
    hosts: dict[str, FoundHost] = {}
    unusable: dict[Path, str] = {}
    dead: dict[Path, tuple[int, int]] = {}
    for page in sorted(_pages(folder, unusable)):
        try:
            found = _host_at(page, group)
            if found is None:
                if (inode := _unused(page)) is not None:
                    dead[page] = inode
                continue
            if found.name in hosts:
                raise PageError(f"{page}: there is a host {found.name} at {hosts[found.name].page}")  # noqa: TRY301
        except (PageError, OSError, ValueError) as error:  # the file may be truncated just now
            unusable[page] = str(error)
        else:
            hosts[found.name] = found
    return FolderScan(_told_apart(hosts), unusable, dead)


def _pages(folder: Path, unusable: dict[Path, str], *, below: bool = True) -> Iterator[Path]:
    """Yield the paths of the folder's page files, of at most MOST_ENTRIES entries, and of its
    subfolders; a folder that cannot be read is added to `unusable`.
    """
    try:
        with os.scandir(folder) as entries:
            seen = [
                (entry.name, entry.is_dir(follow_symlinks=False))
                for entry in islice(entries, MOST_ENTRIES)
            ]
    except OSError as error:
        # This may be a pod's folder that its kubelet made for root alone.
        unusable[folder] = f"{folder} cannot be read: {error.strerror}; let its group read it"
        return
    for name, is_folder in seen:
        path = folder / name
        if name.endswith(SUFFIX):
            yield path
        elif below and is_folder and not name.startswith("."):
            yield from _pages(path, unusable, below=False)


def _host_at(path: Path, group: str) -> FoundHost | None:
    """Return the host that holds the page's seat, None if no process holds it. Raises PageError or
    OSError for a page that cannot be used.
    """
    name = host_name(path)
    if not _seated(path):
        return None
    with ControlPage.open(path, group) as page:
        seat = None if page.cut_short else page.seat.peek()
        inode = page.inode
        said = HostDescription.read(path)
    if said is None:
        raise PageError(
            f"{path}: its host describes itself nowhere; give it ROSE_HOST_DIR in place of"
            " ROSE_CONTROL_PAGE"
        )
    if seat is None or seat.taken_ns != said.seated_ns:
        raise PageError(f"{path}: its host has not described itself since it started")
    return FoundHost(name, path, inode, said)


def _seated(path: Path) -> bool:
    """Return True if a running process holds the lock (seat) of this page file, as its host
    does.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        return is_held(descriptor, SEAT)
    finally:
        os.close(descriptor)


def _unused(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a page file that no process uses; None for any other file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        page = stat.S_ISREG(status.st_mode) and os.pread(descriptor, len(MAGIC), 0) == MAGIC
        return inode_of(status) if page and not is_in_use(descriptor) else None
    finally:
        os.close(descriptor)


def sweep(page: Path, inode: tuple[int, int]) -> bool:
    """Delete a dead page and its description, and return True; return False, and delete nothing, if
    the page is in use or another file by now. Raises OSError.
    """
    if _unused(page) != inode:
        return False
    page.with_suffix(".json").unlink(missing_ok=True)
    page.unlink(missing_ok=True)
    return True


def _told_apart(hosts: Mapping[str, FoundHost]) -> dict[str, FoundHost]:
    """Return the hosts with `alone` set: True if no other host names one of its GPUs."""
    users: dict[str, int] = {}
    for host in hosts.values():
        for device in set(host.said.devices):
            users[device] = users.get(device, 0) + 1
    return {
        name: replace(host, alone=all(users[device] == 1 for device in host.said.devices))
        for name, host in hosts.items()
    }


@dataclass(frozen=True, slots=True)
class HostFound:
    """Result of HostBook: a new host is there; open it.

    slot: its number among this node's hosts, which also numbers its guest.
    """

    host: FoundHost
    slot: int


@dataclass(frozen=True, slots=True)
class HostLost:
    """Result of HostBook: a host has ended, or another process took its page; close it."""

    name: str


@dataclass(frozen=True, slots=True)
class PageRefused:
    """Result of HostBook: a page cannot be used, for this reason; log it."""

    page: Path
    reason: str


@dataclass(frozen=True, slots=True)
class PageDead:
    """Result of HostBook: no process has used this page for DEAD_LOOKS scans; delete it."""

    page: Path
    inode: tuple[int, int]


class HostBook:
    """State machine that turns folder scans into hosts found and lost; it holds at most `at_most`
    hosts.
    """

    def __init__(self, at_most: int) -> None:
        self._slots: list[FoundHost | None] = [None] * at_most
        self._missed: dict[str, int] = {}
        self._refused: dict[tuple[Path, str], int] = {}
        self._untaken: dict[str, str] = {}
        self._dead: dict[tuple[Path, tuple[int, int]], int] = {}

    def step(self, seen: FolderScan) -> list[HostFound | HostLost | PageRefused | PageDead]:
        """Apply one scan and return what changed: lost hosts first, since their slots are free
        again, then refused pages, dead pages and new hosts.
        """
        left = [HostLost(host.name) for host in self.status() if self._gone(host, seen)]
        for slot, host in enumerate(self._slots):
            if host is not None and HostLost(host.name) in left:
                self._slots[slot] = None
        self._untaken = {n: why for n, why in self._untaken.items() if n in seen.hosts}
        known = {host.name for host in self.status()}
        came, unusable = [], dict(seen.unusable)
        for name, host in sorted(seen.hosts.items()):
            if name in known:
                continue
            if None not in self._slots:
                unusable[host.page] = (
                    f"{host.page}: this node has {len(self._slots)} hosts already; raise"
                    " discover.at_most"
                )
                continue
            slot = self._slots.index(None)
            self._slots[slot] = host
            came.append(HostFound(host, slot))
        return [*left, *self._refusals(unusable), *self._buried(seen.dead), *came]

    def untaken(self, host: FoundHost, reason: str) -> list[PageRefused]:
        """Forget a host that could not be opened, so that the next scan finds it again; return one
        PageRefused, or none if this reason was reported before.
        """
        self._slots = [None if each == host else each for each in self._slots]
        told = self._untaken.get(host.name) == reason
        self._untaken[host.name] = reason
        return [] if told else [PageRefused(host.page, reason)]

    def status(self) -> list[FoundHost]:
        """Return the hosts that are present, in the order of their slots."""
        return [host for host in self._slots if host is not None]

    @property
    def refused(self) -> int:
        """Number of unusable pages and of hosts that could not be opened (any thread)."""
        taken = {host.name for host in self.status()}
        lasting = sum(looks >= REFUSED_LOOKS for looks in self._refused.values())
        return lasting + len(set(self._untaken) - taken)

    def _gone(self, known: FoundHost, seen: FolderScan) -> bool:
        found = seen.hosts.get(known.name)
        if found is not None:
            self._missed.pop(known.name, None)
            return found != known
        # A page that was written at that moment is no reason to end a guest; it is frozen anyway.
        missed = self._missed.get(known.name, 0) + 1
        self._missed[known.name] = missed
        if missed < GONE_LOOKS:
            return False
        del self._missed[known.name]
        return True

    def _buried(self, dead: Mapping[Path, tuple[int, int]]) -> list[PageDead]:
        """Return a PageDead for each page that has been dead for exactly DEAD_LOOKS scans in a row;
        a page in use again is counted anew.
        """
        self._dead = {each: self._dead.get(each, 0) + 1 for each in dead.items()}
        return [PageDead(*each) for each, looks in self._dead.items() if looks == DEAD_LOOKS]

    def _refusals(self, unusable: Mapping[Path, str]) -> list[PageRefused]:
        """Return a PageRefused for each page that has been unusable for exactly REFUSED_LOOKS scans
        in a row.
        """
        some = islice(unusable.items(), MOST_REFUSED)
        self._refused = {each: self._refused.get(each, 0) + 1 for each in some}
        return [
            PageRefused(*each) for each, looks in self._refused.items() if looks == REFUSED_LOOKS
        ]
