"""Requests of a batch: the lines of its file, checked before the first is sent."""

from collections.abc import Collection, Iterator
from typing import BinaryIO, Final

import msgspec
from msgspec import Struct

from rose.gateway.batch_jobs.folder import LineFault

MAX_REQUESTS: Final = 50_000
MAX_ID_CHARS: Final = 512
# A file with more faults has one fault, again and again.
MOST_FAULTS: Final = 100


class BatchLine(Struct):
    """One request of a batch."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


_decode = msgspec.json.Decoder(BatchLine).decode


def faults_of(file: BinaryIO, endpoint: str, most_bytes: int) -> tuple[int, list[LineFault]]:
    """Return the number of requests in a file, and its faults by line, none if it can be run.

    most_bytes: longest line that the gateway would take as a request.
    """
    faults: list[LineFault] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(_lines(file, most_bytes), 1):
        if len(faults) == MOST_FAULTS:
            break
        if not line.strip():
            continue
        found = _checked(line, endpoint, most_bytes, seen)
        if isinstance(found, str) and len(seen) == MAX_REQUESTS:
            words = f"a batch has at most {MAX_REQUESTS} requests"
            faults.append(LineFault("too_many_requests", number, words))
            break
        if isinstance(found, str):
            seen[found] = number
        else:
            faults.append(LineFault(found[0], number, found[1], found[2]))
    if not seen and not faults:
        faults.append(LineFault("empty_file", None, "the file has no request, one a line"))
    return len(seen), faults


def _lines(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Yield each line, of a longer one its first `most_bytes` + 1 bytes."""
    while line := file.readline(most_bytes + 1):
        yield line
        while len(line) > most_bytes and not line.endswith(b"\n"):
            line = file.readline(most_bytes + 1)


def _checked(
    line: bytes, endpoint: str, most_bytes: int, seen: dict[str, int]
) -> str | tuple[str, str, str | None]:
    """Return a sound line's custom id, or the code, words and field of its fault."""
    if len(line) > most_bytes:
        return "line_too_long", f"a request has at most {most_bytes} bytes", None
    try:
        asked = _decode(line)
    except msgspec.ValidationError as error:
        return "invalid_request", str(error), None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_json_line", f"this line is no JSON: {error}", None
    if not 0 < len(asked.custom_id) <= MAX_ID_CHARS:
        return "invalid_custom_id", f"custom_id: 1 to {MAX_ID_CHARS} characters", "custom_id"
    if asked.custom_id in seen:
        words = f"custom_id {asked.custom_id[:80]!r} is that of line {seen[asked.custom_id]}"
        return "duplicate_custom_id", words, "custom_id"
    if asked.method != "POST":
        return "invalid_method", f"method is {asked.method[:20]!r}; it is POST", "method"
    if asked.url != endpoint:
        words = f"url is {asked.url[:80]!r}, and the batch's endpoint {endpoint}"
        return "mismatched_endpoint", words, "url"
    if not bytes(asked.body).lstrip().startswith(b"{"):
        return "invalid_body", "body: the request's JSON object", "body"
    return asked.custom_id


def requests_of(file: BinaryIO, done: Collection[str]) -> Iterator[BatchLine]:
    """Yield the requests of a sound file that are not done."""
    for line in file:
        if line.strip():
            asked = _decode(line)
            if asked.custom_id not in done:
                yield asked
