"""Threads for GPUs, an array for NCCL's links."""

import threading

import numpy as np
from numpy.typing import NDArray


class StandInLinks:
    """State that a group's members share. `flip`: one bit changes on the way to others."""

    def __init__(self, size: int, flip: bool = False) -> None:
        self.size = size
        self.flip = flip
        self.barrier = threading.Barrier(size)
        self.body: NDArray[np.uint8] = np.zeros(0, np.uint8)


class StandInCommunicator:
    """One member. `dies_after`: so many broadcasts; what follows it leaves the others waiting."""

    def __init__(self, rank: int, links: StandInLinks) -> None:
        self.rank, self.size = rank, links.size
        self.links = links
        self.dies_after: int | None = None
        self.broadcasts = 0

    def broadcast(self, body: NDArray[np.uint8], root: int) -> NDArray[np.uint8]:
        if self.broadcasts == self.dies_after:
            raise RuntimeError("the GPU has fallen off the bus")
        self.broadcasts += 1
        links = self.links
        if self.rank == root:
            links.body = body
        links.barrier.wait(20)
        got = links.body.copy()
        assert got.size == body.size, "members make different calls"
        if links.flip and self.rank != root and got.size > 8:
            got[got.size // 2] ^= 1
        links.barrier.wait(20)
        return got

    def abort(self) -> None:
        self.links.barrier.abort()


def stand_in_group(size: int, *, flip: bool = False) -> list[StandInCommunicator]:
    """All members of one group."""
    links = StandInLinks(size, flip)
    return [StandInCommunicator(rank, links) for rank in range(size)]
