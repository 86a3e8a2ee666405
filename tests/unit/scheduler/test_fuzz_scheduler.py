"""The scheduler's fuzz target holds for messages of every kind, whole and damaged."""

from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from message_cases import filled

from rose.rpc import rose_pb2 as pb
from tests.fuzz import target_scheduler as target

# In the order of the target: unary calls, then the streams of two nodes.
KINDS: list[type[Message]] = [*target.UNARY, pb.NodeReport, pb.NodeReport]


def framed(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + len(body).to_bytes(2, "big") + body


@st.composite
def inputs(draw: st.DrawFn) -> bytes:
    data = b""
    for kind in draw(st.lists(st.integers(0, len(KINDS) - 1), max_size=6)):
        message: Message = draw(filled(KINDS[kind]))
        data += framed(kind, message.SerializeToString())
    return data


@given(inputs(), st.integers(0, 10_000), st.integers(0, 255))
def test_damaged_messages_break_nothing(data: bytes, at: int, byte: int) -> None:
    target.run_messages(data)
    if data:
        damaged = bytearray(data)
        damaged[at % len(data)] = byte
        target.run_messages(bytes(damaged))


@given(st.binary(max_size=400))
def test_any_bytes_break_nothing(data: bytes) -> None:
    target.run_messages(data)
