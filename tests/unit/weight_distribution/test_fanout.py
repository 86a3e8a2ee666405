"""A chunk reaches a whole group and is checked there; NCCL itself needs a GPU and is not here."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest
from group_cases import stand_in_group

from weight_transfer import ChunkDigestError, chunk_id
from weight_transfer.errors import FanoutError
from weight_transfer.fetch.nccl import Fanout, NcclCommunicator


def group(size: int, *, flip: bool = False) -> list[Fanout]:
    return [Fanout(member) for member in stand_in_group(size, flip=flip)]


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


def test_a_chunk_that_its_root_could_not_get_is_nobodys() -> None:
    members = group(2)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(member.hand, "00" * 32, None, 0) for member in members]
        assert [call.result(5) for call in calls] == [None, None]


def test_a_wrong_call_is_said_before_anybody_waits() -> None:
    member = Fanout(stand_in_group(2)[1])
    with pytest.raises(FanoutError, match="only the root of a fan-out"):
        member.hand("00" * 32, b"x", 0)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is here")
def test_without_cupy_it_says_what_to_do() -> None:
    with pytest.raises(FanoutError, match="share over HTTP"):
        NcclCommunicator.new_id()
