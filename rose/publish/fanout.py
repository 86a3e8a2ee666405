"""Fan-out inside a fixed group of GPUs: one has a chunk, all get it over their own links.

HTTP between neighbours needs no group and survives anybody; this does neither, and is for GPUs that
start and stop together. Not measured on a GPU yet.

root   length (8 bytes) ──► bytes ──► everybody checks the name
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError
from weight_transfer.chunk import check_id

_LENGTH_BYTES = 8
_MOST_BYTES = 1 << 32


class Communicator(Protocol):
    """What a fan-out needs of a group."""

    rank: int
    size: int

    def broadcast(self, body: NDArray[np.uint8], root: int) -> NDArray[np.uint8]:
        """Give the root's `body` to all; the others hand in a buffer of the same length."""
        ...


class Fanout:
    """Hands chunks to a fixed group. All members call `hand` for the same chunks in one order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def hand(self, name: str, body: bytes | None, root: int) -> bytes:
        """A chunk by name, from the member `root`, which has its `body`, to all.

        Raises ChunkDigestError where what came is not what the name says, ConfigError for a wrong
        call.
        """
        mine = self._communicator.rank == root
        if mine is (body is None) or not 0 <= root < self._communicator.size:
            raise ConfigError("the root of a fan-out hands in the chunk, and nobody else does")
        head = np.frombuffer(len(body or b"").to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        told = self._communicator.broadcast(head, root)
        length = int.from_bytes(told.tobytes(), "little")
        if length > _MOST_BYTES:
            raise ConfigError(f"a chunk of {length} bytes was announced; the group is out of step")
        buffer = np.frombuffer(body, np.uint8) if body is not None else np.zeros(length, np.uint8)
        encoded = self._communicator.broadcast(buffer, root).tobytes()
        check_id(name, encoded)
        return encoded


class NcclCommunicator:
    """A group over NCCL, through CuPy. `unique_id`: made by one member (`new_id`), told to all."""

    def __init__(self, rank: int, size: int, unique_id: tuple[int, ...]) -> None:
        self.rank, self.size = rank, size
        self._cupy = _cupy()
        self._group: Any = self._cupy.cuda.nccl.NcclCommunicator(size, unique_id, rank)

    @staticmethod
    def new_id() -> tuple[int, ...]:
        """Name of a new group."""
        made: tuple[int, ...] = _cupy().cuda.nccl.get_unique_id()
        return made

    def broadcast(self, body: NDArray[np.uint8], root: int) -> NDArray[np.uint8]:
        """Through this process's current device; returns once all of it is here."""
        nccl, stream = self._cupy.cuda.nccl, self._cupy.cuda.get_current_stream()
        device = self._cupy.asarray(body)
        self._group.bcast(device.data.ptr, device.size, nccl.NCCL_UINT8, root, stream.ptr)
        got: NDArray[np.uint8] = self._cupy.asnumpy(device)
        return got


def _cupy() -> Any:  # noqa: ANN401 -- a library that is here only where a GPU is
    try:
        import cupy
        import cupy.cuda.nccl
    except ImportError as error:
        raise ConfigError(
            "fan-out over NCCL needs CuPy and a GPU; without them neighbours share over HTTP"
        ) from error
    return cupy
