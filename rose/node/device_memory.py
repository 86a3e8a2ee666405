"""What a guest on a GPU holds of it.

    driver lists its processes, and with how much ──► that
    driver does not (a container, whose process numbers or memory it does not tell)
        ──► KV pages that the guest says it has, believed as far as the card's free memory grew

Which of the two is settled with the first figure: they do not compare with each other.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from executor import GuestState
from rose.nvml import Card, CardError, CardReader, Client
from rose.procfs import group_members, in_first_pid_namespace

DRIVER = "driver, by process"
PAGE = "the guest's page, bounded by the card's free memory"


class ListedMemory:
    """The driver's list, read as one guest's. Pure.

    A process is counted until the list no longer has it: a driver takes memory back after the
    process has ended. One that lives and vanished from the list makes the figure unknown.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def held_bytes(self, clients: Sequence[Client], members: Collection[int]) -> int | None:
        """`members`: processes of the guest's group that live now."""
        told = {client.pid: client.memory_bytes for client in clients}
        self._seen |= told.keys() & set(members)
        if any(pid in members and pid not in told for pid in self._seen):
            return None
        held = [told[pid] for pid in self._seen if pid in told]
        known = [amount for amount in held if amount is not None]
        return sum(known) if len(known) == len(held) else None


class BoundedClaim:
    """KV pages as the guest publishes them, never falling faster than the card's free memory
    grows. Pure. Who takes that memory meanwhile makes the figure too large, which is safe."""

    def __init__(self, mapped_bytes: int, free_bytes: int) -> None:
        """As they are at the beginning."""
        self._mapped_bytes = mapped_bytes
        self._free_bytes = free_bytes

    def held_bytes(self, mapped_bytes: int, free_bytes: int) -> int:
        """As they are now."""
        claimed = self._mapped_bytes - mapped_bytes
        return self._mapped_bytes - max(0, min(claimed, free_bytes - self._free_bytes))


class DeviceMemory:
    """MemoryGauge of a guest on a GPU."""

    def __init__(
        self,
        reader: CardReader,
        card: Card,
        group: Callable[[], int | None],
        state: Callable[[], GuestState | None],
    ) -> None:
        """`group`: its process group, None while it has none. `state`: its section of the page."""
        self._reader = reader
        self._card = card
        self._group = group
        self._state = state
        self._listed: ListedMemory | None = None
        self._claim: BoundedClaim | None = None

    @property
    def by(self) -> str:
        """DRIVER or PAGE."""
        return DRIVER if self.sees_all else PAGE

    @property
    def sees_all(self) -> bool:
        """The guest says nothing of its weights."""
        return self._claim is None

    def held_bytes(self) -> int | None:
        """None too while the driver does not answer."""
        members = self._members()
        try:
            if self._claim is None:
                clients = self._reader.clients(self._card)
                if self._listed is None and _accounted(clients, members):
                    self._listed = ListedMemory()
                if self._listed is not None:
                    return self._listed.held_bytes(clients, members)
            return self._claimed() if members else 0
        except CardError:
            return None

    def _members(self) -> set[int]:
        group = self._group()
        return set() if group is None else {pid for pid, _ in group_members(group)}

    def _claimed(self) -> int | None:
        state = self._state()
        if state is None:
            return None
        free_bytes = self._reader.free_bytes(self._card)
        if self._claim is None:
            self._claim = BoundedClaim(state.bytes_mapped, free_bytes)
        return self._claim.held_bytes(state.bytes_mapped, free_bytes)


def _accounted(clients: Sequence[Client], members: Collection[int]) -> bool:
    """Whether the driver's list tells what these processes hold.

    Outside the first namespace its numbers may be those of other processes: then it is believed
    only where all that it lists is here.
    """
    ours = [client for client in clients if client.pid in members]
    if not ours or any(client.memory_bytes is None for client in ours):
        return False
    return in_first_pid_namespace() or all(
        Path(f"/proc/{client.pid}").exists() for client in clients if client.pid
    )
