"""Errors for people: one line that says what is wrong and what to do next.

RoseError
├── ConfigError          a setting, option or file is wrong
├── EngineStartError     an engine could not be started
├── UnavailableError     a process of ROSE does not answer
│   └── NotAnnouncedError    a version is durable, but not announced yet
└── RefusedError         a request breaks a rule (stale epoch, wrong version, no room)
    ├── RunHeldError     another trainer has the job
    └── RunFencedError   this trainer had the job, and another has it now

`decoded` turns every fault in bytes from outside into one error. msgspec has errors of its own for
invalid bytes, but raises UnicodeDecodeError for text that is not UTF-8, and RecursionError for
brackets nested too deep.
"""

from typing import Final, Protocol, TypeVar

import msgspec

BAD_BYTES: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Decoder(Protocol[T_co]):
    """Protocol of msgspec's decoders of JSON and MessagePack."""

    def decode(self, buf: bytes, /) -> T_co:
        """Return the value that these bytes encode."""


def decoded(decoder: Decoder[T], data: bytes) -> T:
    """Return the value that the decoder reads from bytes.

    Raises `msgspec.DecodeError` for any invalid bytes, UTF-8 and nesting included.
    """
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("it is no UTF-8") from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deep") from error


class RoseError(Exception):
    """Base class of all errors that end a command with one line and exit code 2."""


class ConfigError(RoseError):
    """Error: a setting, an option or a file is wrong."""


class EngineStartError(RoseError):
    """Error: an engine could not be started."""


class UnavailableError(RoseError):
    """Error: a process of ROSE does not answer."""


class NotAnnouncedError(UnavailableError):
    """Error: a published version is durable, but no scheduler knows it yet.

    Continue: it is announced later.
    """


class RefusedError(RoseError):
    """Error: a request breaks a rule, such as a stale epoch, a wrong version, or no room."""


class RunHeldError(RefusedError):
    """Error: another living trainer has the job. Stop that trainer, or take over."""


class RunFencedError(RefusedError):
    """Error: this trainer has lost its job to another trainer, and must not publish any more."""
