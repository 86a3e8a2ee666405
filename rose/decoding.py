"""Decoding of bytes from outside: one error for all that is wrong with them.

msgspec has errors of its own for bytes that are not what they should be, but raises
UnicodeDecodeError for text that is no UTF-8, and RecursionError for brackets nested too deep.
"""

from typing import Final, Protocol, TypeVar

import msgspec

BAD_BYTES: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Decoder(Protocol[T_co]):
    """A decoder of msgspec's, of JSON or MessagePack."""

    def decode(self, buf: bytes, /) -> T_co:
        """The value in these bytes."""


def decoded(decoder: Decoder[T], data: bytes) -> T:
    """What the bytes say. Raises `msgspec.DecodeError` for bytes that say anything else."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("it is no UTF-8") from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deep") from error
