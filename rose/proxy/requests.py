"""Requests that pass, their engine, and the head that it gets: a function of the request.

    POST /REPLICA/rose/v1/generate   with a length   ──► its port, a head written anew
    anything else                                    ──► PassRefusedError, before the engine's turn

The head is written and not edited: a field that is not listed here never reaches an engine, least
of all the secret by which its node controls it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from rose.contract.replica import (
    IMAGES,
    MAX_BODY_BYTES,
    MAX_IMAGE_BYTES,
    POOLING,
    TURNS,
    Fault,
    Refusal,
)
from rose.errors import RoseError

PATHS: Final = frozenset(path.encode() for path in (*TURNS, *POOLING))
# Engines read these fields besides the length. A turn's trace stays with it.
PASSED: Final = frozenset({b"content-type", b"accept", b"traceparent", b"tracestate"})
MAX_HEAD_BYTES: Final = 16 << 10
REASONS: Final = {
    400: b"Bad Request",
    403: b"Forbidden",
    404: b"Not Found",
    411: b"Length Required",
    413: b"Content Too Large",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
_encode = msgspec.json.Encoder().encode

Headers = Sequence[tuple[bytes, bytes]]


class PassRefusedError(RoseError):
    """Error raised for a request that the proxy does not pass on; `status` and `kind` are in its
    HTTP answer.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    @property
    def answer(self) -> bytes:
        """Complete HTTP response in the shape of a replica's refusals; it ends the connection."""
        body = _encode(Refusal(Fault(self.kind, str(self))))
        lines = (
            b"HTTP/1.1 %d %b" % (self.status, REASONS[self.status]),
            b"Content-Type: application/json",
            b"Content-Length: %d" % len(body),
            b"Connection: close",
            b"",
            body,
        )
        return b"\r\n".join(lines)


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """Request that the proxy passes on: the loopback port of its engine, and the HTTP head to send
    there.
    """

    port: int
    head: bytes


def passed(
    ports: Mapping[bytes, int], method: bytes, target: bytes, headers: Headers
) -> PassedRequest:
    """Return the port and the new head of a request that may pass; `ports` has the engine's port by
    replica name.

    headers: names in lower case. Raises PassRefusedError for any other request.
    """
    name, path, query = _parted(target)
    port = ports.get(name)
    if port is None:
        raise PassRefusedError(404, "not_found", "this node has no such replica")
    if method != b"POST" or path not in PATHS:
        raise PassRefusedError(404, "not_found", "only turns pass here")
    if any(field == b"upgrade" for field, _ in headers):
        raise PassRefusedError(400, "bad_request", "only HTTP is spoken here")
    length = _length(headers, MAX_IMAGE_BYTES if path == IMAGES.encode() else MAX_BODY_BYTES)
    lines = [b"POST %b%b HTTP/1.1" % (path, query), b"host: 127.0.0.1:%d" % port]
    lines += [b"%b: %b" % field for field in headers if field[0] in PASSED]
    lines += [b"content-length: %d" % length, b"", b""]
    return PassedRequest(port, b"\r\n".join(lines))


def _parted(target: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the replica's name, the path at the engine, and the query with its question mark, ""
    without one.
    """
    whole, mark, query = target.partition(b"?")
    name, slash, path = whole.removeprefix(b"/").partition(b"/")
    return unquote_to_bytes(name), slash + path, mark + query


def _length(headers: Headers, most: int) -> int:
    """Return the body's length from its one Content-Length header, so that engine and proxy agree
    on its end. Raises PassRefusedError for one above `most` too.
    """
    said = [value for name, value in headers if name == b"content-length"]
    if any(name == b"transfer-encoding" for name, _ in headers) or len(said) != 1:
        raise PassRefusedError(411, "length_required", "say the length of the body, once")
    if not said[0].isdigit():
        raise PassRefusedError(400, "bad_request", "the length of the body is no number")
    # Python takes long to convert a long run of digits.
    if len(said[0]) > 12 or int(said[0]) > most:
        raise PassRefusedError(413, "too_large", f"a body has at most {most} bytes")
    return int(said[0])
