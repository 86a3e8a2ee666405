"""The GPUs of a node's replicas: found before anything starts, asked when it matters."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from rose.errors import EngineStartError
from rose.node.config import NodeConfig
from rose.node.engine_config import ReplicaConfig
from rose.nvml import Card, CardError, CardReader, Nvml, card_of, insist_usable

GIB = 1 << 30
# What an engine has on a card beside weights and KV: its context, workspaces, graphs. A guess.
ENGINE_BYTES = 3 * GIB
DEFAULT_PIPES = Path("/tmp/nvidia-mps")  # noqa: S108 -- CUDA's own default
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
# No folder, so CUDA finds no daemon in it and goes without.
NO_PIPES = "/dev/null"
# CUDA's words for a client of MPS: 0 normal, 1 below normal.
LOW_PRIORITY = "1"


class Gpus:
    """What the driver says, opened with the first question: a node without a GPU has no driver."""

    def __init__(self, open_reader: Callable[[], CardReader] = Nvml) -> None:
        self._open = open_reader
        self._reader: CardReader | None = None

    @property
    def reader(self) -> CardReader:
        """Raises CardError where there is no driver."""
        if self._reader is None:
            self._reader = self._open()
        return self._reader

    def card(self, device: int | str) -> Card:
        """A card that engines can run on. Raises CardError that says what is wrong."""
        card = card_of(self.reader.cards(), device)
        insist_usable(card)
        return card

    def insist_all(self, config: NodeConfig) -> None:
        """Raise CardError unless every replica has its card, and a guest can share its host's."""
        if config.host is not None and config.host.device is not None:
            self.card(config.host.device)
        for replica in config.replicas:
            self.environment(replica)
            if replica.kind == "guest" and config.host is not None:
                self._insist_shared(replica, config.host.device)

    def _insist_shared(self, guest: ReplicaConfig, hosts: int | str | None) -> None:
        if guest.device is None:
            return
        card = self.card(guest.device)
        if hosts is not None and self.card(hosts).uuid != card.uuid:
            raise CardError(
                f"{guest.id} is on GPU {guest.device} and its host on {hosts}; a guest shares its"
                " host's GPU"
            )
        if card.compute_mode.startswith("exclusive") and not guest.wants_mps:
            raise CardError(
                f"{card.name} is in compute mode {card.compute_mode}, which lets one process in:"
                f" {guest.id} cannot share it; its owner must set the default mode, or run MPS"
            )

    def insist_room(self, replica: ReplicaConfig, headroom_bytes: int) -> None:
        """Raise EngineStartError unless weights and KV fit on its card beside the headroom."""
        if replica.device is None:
            return
        card = self.card(replica.device)
        needed = ENGINE_BYTES + replica.weights_bytes + replica.kv_bytes
        free = self.reader.free_bytes(card) - headroom_bytes
        if free < needed:
            beyond = f" beyond the headroom of {headroom_bytes / GIB:.1f}" if headroom_bytes else ""
            raise EngineStartError(
                f"{replica.id}: weights, KV and engine need {needed / GIB:.1f} GiB of {card.name}"
                f" and {max(0, free) / GIB:.1f} GiB are free{beyond}; lower kv_bytes, or start the"
                " host with less KV"
            )

    def environment(self, replica: ReplicaConfig) -> dict[str, str]:
        """What its engine is told of its card. Raises CardError."""
        if replica.device is None:
            return {}
        told = card_environment(self.card(replica.device))
        if replica.wants_mps:
            told[PIPES] = str(insist_mps(replica))
        elif replica.kind == "guest":
            # CUDA joins whatever control daemon it finds, and one client's fault ends them all.
            told[PIPES] = NO_PIPES
        if replica.mps_priority == "low":
            told["CUDA_MPS_CLIENT_PRIORITY"] = LOW_PRIORITY
        if replica.mps_thread_percentage is not None:
            told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(replica.mps_thread_percentage)
        return told


def card_environment(card: Card) -> dict[str, str]:
    """Names one card to CUDA, by what does not change when another card comes or goes."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": card.uuid}


def insist_mps(replica: ReplicaConfig) -> Path:
    """The pipes of the MPS control daemon that the engine would find. Raises CardError."""
    pipes = pipe_folder(replica.extra_env)
    if not control_daemon_at(pipes):
        raise CardError(
            f"{replica.id} wants MPS, and no MPS control daemon has its pipes in {pipes}; start"
            f" `nvidia-cuda-mps-control -d` for host and guest, set {PIPES}, or leave mps_* out"
        )
    return pipes


def pipe_folder(own: dict[str, str]) -> Path:
    """Where a process with such variables of its own looks for MPS."""
    return Path(own.get(PIPES) or os.environ.get(PIPES) or DEFAULT_PIPES)


def control_daemon_at(pipes: Path) -> bool:
    """Whether a control daemon has opened its pipes there. It is never spoken to."""
    try:
        mode = (pipes / "control").stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
