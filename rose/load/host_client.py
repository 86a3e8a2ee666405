"""One streamed completion from the host, timed with as little work per token as possible.

The load generator shares a core with the trainer, so chunks are not parsed on the way: the clock is
read at the first one, and the token count comes from the usage message that ends the stream.
"""

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import aiohttp
import msgspec

_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_DONE = b"data: [DONE]"
# The usage message and the end mark together are about 400 bytes.
_TAIL_BYTES = 2_048


@dataclass(frozen=True, slots=True)
class Completion:
    """How one request ended; `status` is `ok` or says what went wrong."""

    status: str
    ttft_s: float | None
    e2e_s: float
    output_tokens: int
    output_digest: str | None = None


class CompletionBody(msgspec.Struct, frozen=True):
    """What is posted to `/v1/completions`."""

    model: str
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    # The arrivals fix the length of every answer; the model must not end it early.
    ignore_eos: bool = True
    stream: bool = True
    stream_options: dict[str, bool] = msgspec.field(default_factory=lambda: {"include_usage": True})
    return_token_ids: bool = False


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_CHUNK = msgspec.json.Decoder(_Chunk)


def _digest(stream: bytes) -> str:
    """Name of the tokens that a stream of chunks carried."""
    tokens: list[int] = []
    for line in stream.split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in _CHUNK.decode(line[len(b"data: ") :]).choices:
                tokens += choice.token_ids or ()
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


async def _stream(
    response: aiohttp.ClientResponse, whole: bytearray | None
) -> tuple[float | None, bytes]:
    """(clock at the first chunk or None, last bytes of the stream); `whole` takes all of it."""
    first_s = None
    tail = b""
    async for data in response.content.iter_any():
        if first_s is None:
            first_s = time.monotonic()
        if whole is not None:
            whole += data
        tail = data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else (tail + data)[-_TAIL_BYTES:]
    return first_s, tail


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    body: CompletionBody,
    request_id: str,
    arrival_s: float,
    secret: Mapping[str, str] = MappingProxyType({}),
) -> Completion:
    """Post one completion; times count from `arrival_s`, when it should have been sent.

    `secret`: headers that the engine asks for, where it is one's own guest.

    Never raises for what a host can do wrong: that becomes the status.
    """
    first_s: float | None = None
    tokens = 0
    kept = bytearray() if body.return_token_ids else None
    headers = {"X-Request-Id": request_id, "Content-Type": "application/json", **secret}
    try:
        async with session.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status != 200:
                status = f"http_{response.status}"
            else:
                first_s, tail = await _stream(response, kept)
                usage = _USAGE.search(tail)
                tokens = int(usage[1]) if usage else 0
                whole = _DONE in tail and tokens == body.max_tokens
                status = "ok" if whole else "broken"
    except TimeoutError:
        status = "timeout"
    except aiohttp.ClientError as error:
        status = f"client_{type(error).__name__}"
    end_s = time.monotonic()
    ttft_s = None if first_s is None else first_s - arrival_s
    # Chunks are parsed once nothing is measured any more.
    digest = _digest(bytes(kept)) if kept and status == "ok" else None
    return Completion(status, ttft_s, end_s - arrival_s, tokens, digest)
