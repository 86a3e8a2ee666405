"""What goes over a worker's pipes: frames of four bytes of length and a msgpack struct."""

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import BinaryIO

import msgspec

LENGTH = struct.Struct(">I")
# Token ids of the longest prompt and their strings; anything near this is not an answer.
MAX_FRAME_BYTES = 256 << 20

Variable = bool | int | float | str | None


class Setup(msgspec.Struct, tag=True):
    """A worker's first frame: the tokenizer as `tokenizers` writes it, and its chat template.

    `special` are the template's special tokens by name. `memory_bytes` is what may be allocated
    beyond the tokenizer, `time_s` what a job may take, `max_chars` what a template may render.
    """

    tokenizer: str
    template: str | None
    special: dict[str, str | list[str]]
    max_chars: int
    memory_bytes: int
    time_s: float


class Encode(msgspec.Struct, tag=True):
    """Token ids of texts; `strings` wants the tokens of the first one as text too."""

    texts: list[str]
    add_special_tokens: bool = True
    strings: bool = False


class Chat(msgspec.Struct, tag=True):
    """Token ids of a conversation, which is JSON as its caller sent it."""

    messages: bytes
    variables: dict[str, Variable]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    strings: bool = False


class Decode(msgspec.Struct, tag=True):
    """Text of token ids, packed by `packed`."""

    token_ids: bytes


class Done(msgspec.Struct, tag=True):
    """A job's answer; `token_ids` packed, one for each text."""

    token_ids: list[bytes] = []
    strings: list[str] | None = None
    text: str = ""


class Refused(msgspec.Struct, tag=True):
    """Why a job has no answer; with `last` the worker ends after it."""

    message: str
    last: bool = False


Job = Encode | Chat | Decode
encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_job: Callable[[bytes], Job] = msgspec.msgpack.Decoder(Job).decode
decode_answer: Callable[[bytes], Done | Refused] = msgspec.msgpack.Decoder(Done | Refused).decode


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids below 2**32 as bytes."""
    return array("I", token_ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    """The token ids again."""
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None when the other side is gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def frame(message: object) -> bytes:
    """A frame with one message."""
    body = encode(message)
    return LENGTH.pack(len(body)) + body
