"""Fan-out inside a fixed group of GPUs: one has a chunk, all get it over their own links.

root   length (8 bytes) ──► bytes ──► everybody checks the name

All members make the same calls in the same order, and each call waits for all of them: `group`
sees to both. Not measured on a GPU yet.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError, RoseError
from weight_transfer.chunk import check_id

_LENGTH_BYTES = 8
_MOST_BYTES = 1 << 32
_NOT_HERE = (1 << 64) - 1


class GroupBrokenError(RoseError):
    """The members do not make the same calls: nothing can be handed around any more."""


class Communicator(Protocol):
    """What a fan-out needs of a group."""

    rank: int
    size: int

    def broadcast(self, body: NDArray[np.uint8], root: int) -> NDArray[np.uint8]:
        """Give the root's `body` to all; the others hand in a buffer of the same length."""
        ...

    def abort(self) -> None:
        """End all calls that wait, from another thread."""
        ...


class Fanout:
    """Hands chunks to a fixed group. All members make the same calls in one order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @property
    def rank(self) -> int:
        """Which member this is, from 0."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """Members."""
        return self._communicator.size

    def hand(self, name: str, body: bytes | None, root: int) -> bytes | None:
        """A chunk by name, from the member `root`, which has its `body`, to all.

        None where the root could not get it. Raises ChunkDigestError where what came is not what
        the name says, GroupBrokenError where what came is no chunk.
        """
        if self.rank != root and body is not None:
            raise ConfigError("only the root of a fan-out hands in the chunk")
        length = _NOT_HERE if body is None else len(body)
        head = np.frombuffer(length.to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        told = int.from_bytes(self._communicator.broadcast(head, root).tobytes(), "little")
        if told == _NOT_HERE:
            return None
        if told > _MOST_BYTES:
            raise GroupBrokenError(
                f"a chunk of {told} bytes was announced; the group is out of step"
            )
        buffer = np.zeros(told, np.uint8) if body is None else np.frombuffer(body, np.uint8)
        encoded = self._communicator.broadcast(buffer, root).tobytes()
        check_id(name, encoded)
        return encoded

    def abort(self) -> None:
        """End all calls that wait."""
        self._communicator.abort()


class NcclCommunicator:
    """A group over NCCL, through CuPy. `unique_id`: made by one member (`new_id`), told to all.

    It is made once all members make theirs. `device`: the CUDA ordinal whose links are used.
    """

    def __init__(self, rank: int, size: int, unique_id: tuple[int, ...], device: int = 0) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._cupy = _cupy()
        with self._cupy.cuda.Device(device):
            self._group: Any = self._cupy.cuda.nccl.NcclCommunicator(size, unique_id, rank)

    @staticmethod
    def new_id() -> tuple[int, ...]:
        """Name of a new group."""
        made: tuple[int, ...] = _cupy().cuda.nccl.get_unique_id()
        return made

    def broadcast(self, body: NDArray[np.uint8], root: int) -> NDArray[np.uint8]:
        """Through this process's device; returns once all of it is here."""
        nccl = self._cupy.cuda.nccl
        with self._cupy.cuda.Device(self._device):
            stream = self._cupy.cuda.get_current_stream()
            device = self._cupy.asarray(body)
            self._group.bcast(device.data.ptr, device.size, nccl.NCCL_UINT8, root, stream.ptr)
            got: NDArray[np.uint8] = self._cupy.asnumpy(device)
        return got

    def abort(self) -> None:
        """Part of `Communicator`."""
        self._group.abort()


def _cupy() -> Any:  # noqa: ANN401 -- a library that is here only where a GPU is
    try:
        import cupy
        import cupy.cuda.nccl
    except ImportError as error:
        raise ConfigError(
            "fan-out over NCCL needs CuPy and a GPU; without them neighbours share over HTTP"
        ) from error
    return cupy
