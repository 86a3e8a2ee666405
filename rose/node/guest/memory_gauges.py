"""Memory gauges: how much memory a guest holds, by the kernel or by the GPU's driver.

On a GPU:

    driver lists its processes, and with how much ──► that
    driver does not (a container, whose process numbers or memory it does not tell)
        ──► KV pages that the guest says it has, believed as far as the card's free memory grew

Which of the two is settled with the first figure: they do not compare with each other.

`Gpus` finds the cards of a node's replicas before anything starts.
"""

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import psutil

from executor import GuestState
from rose.errors import EngineStartError
from rose.node.config import HostConfig, NodeConfig, ReplicaConfig
from rose.nvml import Card, CardError, CardReader, Client, Nvml, card_of, insist_usable
from rose.process.procfs import group_bytes, group_members, in_first_pid_namespace

KERNEL = "kernel"
PATIENCE_S = 0.25


class MemoryGauge(Protocol):
    """Interface that measures one guest's memory during one reclaim; figures of one gauge are
    comparable with each other.
    """

    @property
    def by(self) -> str:
        """Name of the source of the figures, such as the kernel or the GPU driver; valid after the
        first measurement.
        """

    @property
    def sees_all(self) -> bool:
        """True if the figures include the weights as well as KV memory; valid after the first
        measurement.
        """

    def held_bytes(self) -> int | None:
        """Return the bytes that the guest holds, None if unknown; an unknown figure never counts as
        freed memory.
        """


class Measuring:
    """Asynchronous reader of a gauge: it measures in a thread and waits at most `patience_s`,
    because a kernel or driver may hang.
    """

    def __init__(self, gauge: MemoryGauge, patience_s: float = PATIENCE_S) -> None:
        self._gauge = gauge
        self._patience_s = patience_s
        self._asked: asyncio.Task[int | None] | None = None

    async def held_bytes(self) -> int | None:
        """Return the gauge's bytes; None if unknown or not there in time, in which case the next
        call waits for the same measurement.
        """
        if self._asked is None:
            self._asked = asyncio.create_task(asyncio.to_thread(self._gauge.held_bytes))
        done, _ = await asyncio.wait((self._asked,), timeout=self._patience_s)
        if not done:
            return None
        answered, self._asked = self._asked, None
        return answered.result()

    def end(self) -> None:
        """Cancel the measurement that is still awaited."""
        if self._asked is not None:
            self._asked.cancel()


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """One measurement of a guest's memory: bytes, None if unknown, and the name of the source."""

    amount: int | None
    by: str

    @classmethod
    def now(cls, gauge: MemoryGauge) -> Self:
        """Return one measurement made with this gauge now; the call may block."""
        amount = gauge.held_bytes()
        return cls(amount, gauge.by)


class HostMemory:
    """Gauge of a guest on the CPU, whose weights and KV memory are in the machine's RAM."""

    by = KERNEL
    sees_all = True

    def __init__(self, group: Callable[[], int | None]) -> None:
        """Keep `group`, which returns the id of the guest's process group, None while it
        has none.
        """
        self._group = group

    def held_bytes(self) -> int | None:
        """Return the proportional set size (PSS) of the guest's process group in bytes; 0 without
        one, None if unknown.
        """
        group = self._group()
        return 0 if group is None else group_bytes(group)


DRIVER = "driver, by process"
PAGE = "the guest's page, bounded by the card's free memory"


class DeviceMemory:
    """Gauge of a guest on GPUs: by the driver's list of processes, or else by the guest's own page,
    bounded by the cards' free memory.

    The first figure is the sum over all cards. Later ones fall as if each card had got back what
    the card with the least got back: a host needs its memory on every card.
    """

    def __init__(
        self,
        reader: CardReader,
        cards: Sequence[Card],
        group: Callable[[], int | None],
        state: Callable[[], GuestState | None],
    ) -> None:
        """Keep `group` and `state`, which return the guest's process group and its section of the
        control page, None without one.
        """
        self._reader = reader
        self._cards = cards
        self._group = group
        self._state = state
        # Processes that the driver has listed on each card, None until it has listed their memory,
        # and what they held at first; pages that the guest claimed and free memory of each card at
        # the first figure by them.
        self._listed: list[set[int]] | None = None
        self._first: list[int] = []
        self._claim: tuple[int, list[int]] | None = None

    @property
    def by(self) -> str:
        """Name of the source of the figures: DRIVER or PAGE."""
        return DRIVER if self.sees_all else PAGE

    @property
    def sees_all(self) -> bool:
        """True if the driver gives the figures; False if the guest's page does, which leaves out
        weights.
        """
        return self._claim is None

    def held_bytes(self) -> int | None:
        """Return the bytes of GPU memory that the guest holds; None if unknown or while the driver
        does not answer.
        """
        group = self._group()
        members = set() if group is None else {pid for pid, _ in group_members(group)}
        try:
            if self._claim is None:
                clients = [self._reader.clients(card) for card in self._cards]
                if self._listed is None and all(_accounted(each, members) for each in clients):
                    self._listed = [set() for _ in self._cards]
                if self._listed is not None:
                    each = zip(self._listed, clients, strict=True)
                    return self._by_driver([_held(*card, members) for card in each])
            return self._by_page() if members else 0
        except CardError:
            return None

    def _by_driver(self, held: Sequence[int | None]) -> int | None:
        """Return the figure by the driver's bytes on each card; None if one is unknown."""
        known = [amount for amount in held if amount is not None]
        if len(known) < len(held):
            return None
        self._first = self._first or known
        freed = [before - now for before, now in zip(self._first, known, strict=True)]
        return sum(self._first) - len(freed) * min(freed) if any(known) else 0

    def _by_page(self) -> int | None:
        """Return the KV bytes that the guest's page claims, of all cards; they fall only as far as
        the free memory of each card grew.

        Another process that takes that memory meanwhile makes the figure too large, which is safe.
        """
        state = self._state()
        if state is None:
            return None
        free_bytes = [self._reader.free_bytes(card) for card in self._cards]
        if self._claim is None:
            self._claim = state.bytes_mapped, free_bytes
        mapped_then, free_then = self._claim
        claimed = mapped_then - state.bytes_mapped
        grown = min(now - then for now, then in zip(free_bytes, free_then, strict=True))
        return mapped_then - max(0, min(claimed, len(free_bytes) * grown))


def _held(listed: set[int], clients: Sequence[Client], members: Collection[int]) -> int | None:
    """Return the sum of the driver's bytes of the guest's processes on one card, ended ones
    included until the driver no longer lists them.

    Return None if a living process vanished from the list.
    """
    told = {client.pid: client.memory_bytes for client in clients}
    listed |= told.keys() & set(members)
    if any(pid in members and pid not in told for pid in listed):
        return None
    held = [told[pid] for pid in listed if pid in told]
    known = [amount for amount in held if amount is not None]
    return sum(known) if len(known) == len(held) else None


def _accounted(clients: Sequence[Client], members: Collection[int]) -> bool:
    """Return True if the driver lists the memory of every listed process of the guest.

    Outside the first pid namespace its pids may be those of other processes, so every listed pid
    must exist here.
    """
    ours = [client for client in clients if client.pid in members]
    if not ours or any(client.memory_bytes is None for client in ours):
        return False
    return in_first_pid_namespace() or all(
        Path(f"/proc/{client.pid}").exists() for client in clients if client.pid
    )


GIB = 1 << 30
# Estimate of an engine's memory on a card beside weights and KV: context, workspaces, graphs.
ENGINE_BYTES = 3 * GIB
DEFAULT_PIPES = Path("/tmp/nvidia-mps")  # noqa: S108 -- CUDA's own default
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
# Path that is not a folder, so CUDA finds no MPS daemon in it and goes without.
NO_PIPES = "/dev/null"
# CUDA's number for the low priority of an MPS client: 0 normal, 1 below normal.
LOW_PRIORITY = "1"


class Gpus:
    """GPUs of this machine, read from the driver, which is opened at the first question: a node
    without a GPU needs no driver.
    """

    def __init__(self, open_reader: Callable[[], CardReader] = Nvml) -> None:
        self._open = open_reader
        self._reader: CardReader | None = None

    @property
    def reader(self) -> CardReader:
        """Reader of the GPU driver, opened on first use. Raises CardError without a driver."""
        if self._reader is None:
            self._reader = self._open()
        return self._reader

    def card(self, device: int | str) -> Card:
        """Return the GPU of this index or UUID. Raises CardError if there is none or engines cannot
        run on it.
        """
        card = card_of(self.reader.cards(), device)
        insist_usable(card)
        return card

    def cards(self, devices: Sequence[int | str]) -> tuple[Card, ...]:
        """Return the GPUs of these indices or UUIDs. Raises CardError if one cannot be used, or is
        named by both.
        """
        found: dict[str, tuple[int | str, Card]] = {}
        for device in devices:
            card = self.card(device)
            if card.uuid in found:
                raise CardError(
                    f"GPU {found[card.uuid][0]} and GPU {device} are the same one, {card.uuid};"
                    " name each GPU once"
                )
            found[card.uuid] = device, card
        return tuple(card for _, card in found.values())

    def insist_all(self, config: NodeConfig) -> None:
        """Raise CardError unless every replica's GPUs are usable, each guest can share its host's,
        and no dedicated replica is on any of theirs.
        """
        hosts = config.host.gpus if config.host is not None else ()
        shared = {card.uuid for card in self.cards(hosts)}
        for replica in config.replicas:
            self.environment(replica)
            if replica.kind == "guest" and config.host is not None:
                self._insist_shared(replica, hosts)
                shared.update(card.uuid for card in self.cards(replica.gpus))
        for replica in config.dedicated:
            for device, card in zip(replica.gpus, self.cards(replica.gpus), strict=True):
                if card.uuid in shared:
                    raise CardError(
                        f"{replica.id} is dedicated and on GPU {device}, where the host or its"
                        " guest is; name another GPU, or make it a guest"
                    )

    def _insist_shared(self, guest: ReplicaConfig, hosts: Sequence[int | str]) -> None:
        known = {card.uuid for card in self.cards(hosts)}
        for device, card in zip(guest.gpus, self.cards(guest.gpus), strict=True):
            if known and card.uuid not in known:
                raise CardError(
                    f"{guest.id} is on GPU {device} and its host on {_listed(hosts)}; a guest"
                    " shares its host's GPUs"
                )
            if card.compute_mode.startswith("exclusive") and not guest.wants_mps:
                raise CardError(
                    f"{card.name} is in compute mode {card.compute_mode}, which lets one process"
                    f" in: {guest.id} cannot share it; its owner must set the default mode, or run"
                    " MPS"
                )

    def insist_used(self, host: HostConfig, publishers: Sequence[int]) -> None:
        """Raise CardError if the engine that publishes for the host computes on a GPU that the
        host's configuration does not name, as far as the driver tells its processes.

        publishers: its engine cores, whose children are its ranks.
        """
        named = {card.uuid for card in self.cards(host.gpus)}
        if not (publishers and named and in_first_pid_namespace()):
            return
        pids = set(publishers)
        for pid in publishers:
            with contextlib.suppress(psutil.Error):
                pids.update(rank.pid for rank in psutil.Process(pid).children(recursive=True))
        for card in self.reader.cards():
            if card.uuid in named:
                continue
            for client in self.reader.clients(card):
                if client.pid in pids:
                    raise CardError(
                        f"the host (process {client.pid}) computes on GPU {card.index} {card.uuid},"
                        f" and {_listed(host.gpus)} is named as its own; correct host.devices"
                    )

    def insist_room(self, replica: ReplicaConfig, headroom_bytes: int) -> None:
        """Raise EngineStartError unless the free memory of each of the replica's GPUs, less the
        headroom, holds its part of the weights, KV and the engine's own need; CPU replicas pass.
        """
        needed = ENGINE_BYTES + replica.weights_bytes // replica.shards + replica.kv_bytes
        for card in self.cards(replica.gpus):
            free = self.reader.free_bytes(card) - headroom_bytes
            if free >= needed:
                continue
            beyond = f" beyond the headroom of {headroom_bytes / GIB:.1f}" if headroom_bytes else ""
            raise EngineStartError(
                f"{replica.id}: weights, KV and engine need {needed / GIB:.1f} GiB of {card.name}"
                f" (GPU {card.index}) and {max(0, free) / GIB:.1f} GiB are free{beyond}; lower"
                " kv_bytes, or start the host with less KV"
            )

    def environment(self, replica: ReplicaConfig) -> dict[str, str]:
        """Return the environment variables that give an engine its GPUs and its place in MPS; empty
        without a GPU. Raises CardError.
        """
        if not replica.gpus:
            return {}
        told = card_environment(self.cards(replica.gpus))
        if replica.wants_mps:
            told[PIPES] = str(insist_mps(replica))
        elif replica.kind == "guest":
            # Hide MPS: CUDA joins any control daemon that it finds, and one client's fault ends all
            # clients.
            told[PIPES] = NO_PIPES
        if replica.mps_priority == "low":
            told["CUDA_MPS_CLIENT_PRIORITY"] = LOW_PRIORITY
        if replica.mps_thread_percentage is not None:
            told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(replica.mps_thread_percentage)
        return told


def card_environment(cards: Sequence[Card]) -> dict[str, str]:
    """Return the variables that show CUDA these GPUs alone, in this order, by UUID, which stays
    valid when another GPU comes or goes.
    """
    uuids = ",".join(card.uuid for card in cards)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": uuids}


def _listed(devices: Sequence[int | str]) -> str:
    return ", ".join(map(str, devices))


def insist_mps(replica: ReplicaConfig) -> Path:
    """Return the pipe folder of the MPS control daemon that the engine would use. Raises CardError
    if no daemon serves it.
    """
    pipes = pipe_folder(replica.extra_env)
    if not control_daemon_at(pipes):
        raise CardError(
            f"{replica.id} wants MPS, and no MPS control daemon has its pipes in {pipes}; start"
            f" `nvidia-cuda-mps-control -d` for host and guest, set {PIPES}, or leave mps_* out"
        )
    return pipes


def pipe_folder(own: dict[str, str]) -> Path:
    """Return the folder in which a process with these variables looks for the pipes of MPS."""
    return Path(own.get(PIPES) or os.environ.get(PIPES) or DEFAULT_PIPES)


def control_daemon_at(pipes: Path) -> bool:
    """Return True if the folder has the control pipe of an MPS daemon; the pipe is not used."""
    try:
        mode = (pipes / "control").stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
