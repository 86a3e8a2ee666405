"""A chunk reaches a whole group and is checked there; NCCL itself needs a GPU and is not here."""

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from rose.errors import ConfigError
from rose.publish.fanout import Fanout, NcclCommunicator
from weight_transfer import ChunkDigestError, chunk_id


class StandInCommunicator:
    """Threads for GPUs, an array for NCCL's links. `flip`: one bit changes on the way to others."""

    def __init__(self, rank: int, size: int, shared: dict[str, NDArray[np.uint8]],
                 barrier: threading.Barrier, flip: bool) -> None:  # fmt: skip
        self.rank, self.size = rank, size
        self._shared, self._barrier, self._flip = shared, barrier, flip

    def broadcast(self, body: NDArray[np.uint8], root: int) -> NDArray[np.uint8]:
        if self.rank == root:
            self._shared["body"] = body
        self._barrier.wait(5)
        got = self._shared["body"].copy()
        assert got.size == body.size
        if self._flip and self.rank != root and got.size > 8:
            got[got.size // 2] ^= 1
        self._barrier.wait(5)
        return got


def group(size: int, *, flip: bool = False) -> list[Fanout]:
    shared: dict[str, NDArray[np.uint8]] = {}
    barrier = threading.Barrier(size)
    return [Fanout(StandInCommunicator(n, size, shared, barrier, flip)) for n in range(size)]


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("body", [b"", b"x" * 100_003])
def test_every_member_has_the_chunk(root: int, body: bytes) -> None:
    members = group(3)
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(member.hand, chunk_id(body), body if n == root else None, root)
            for n, member in enumerate(members)
        ]
        assert [call.result(5) for call in calls] == [body] * 3


def test_a_bit_that_flips_on_the_way_is_found() -> None:
    body = bytes(1_000)
    members = group(2, flip=True)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(members[0].hand, chunk_id(body), body, 0)
        other = pool.submit(members[1].hand, chunk_id(body), None, 0)
        assert first.result(5) == body
        with pytest.raises(ChunkDigestError):
            other.result(5)


def test_a_wrong_call_is_said_before_anybody_waits() -> None:
    member = group(1)[0]
    for body, root in ((None, 0), (b"x", 1)):
        with pytest.raises(ConfigError, match="the root of a fan-out"):
            member.hand("00" * 32, body, root)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is here")
def test_without_cupy_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="share over HTTP"):
        NcclCommunicator.new_id()
