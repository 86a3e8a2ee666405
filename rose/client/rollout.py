"""Turns from the gateway: `POST /inference/v1/generate`."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from rose.client.errors import GatewayUnavailable, RequestRefused, RolloutError, VersionNotServed
from rose.client.turn import Sampling, Turn

MAX_TRIES = 6
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
RETRIED = frozenset({429, 502, 503, 504})
HEADERS = {"Content-Type": "application/json"}


class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_TokenLogprob]


class _Choice(msgspec.Struct, gc=False):
    token_ids: tuple[int, ...]
    logprobs: _Logprobs
    finish_reason: str


class _Version(msgspec.Struct, gc=False):
    version: int
    start: int
    end: int


class _Segment(msgspec.Struct, gc=False):
    replica: str
    kind: str
    start: int
    end: int


class _Answer(msgspec.Struct, gc=False):
    request_id: str
    choices: list[_Choice]
    versions: list[_Version]
    segments: list[_Segment]
    attempts: int


_encode = msgspec.json.Encoder().encode
_decode_answer = msgspec.json.Decoder(_Answer).decode


class RolloutClient:
    """Async context manager; one connection pool, safe for any number of concurrent turns."""

    def __init__(self, base_url: str, timeout_s: float = 300.0) -> None:
        self._url = f"{base_url.rstrip('/')}/inference/v1/generate"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=120.0), timeout=self._timeout
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        min_version: int | None = None,
    ) -> Turn:
        """Generate one turn; retries use the same request id, so none is generated twice.

        Raises VersionNotServed, RequestRefused, or GatewayUnavailable after `MAX_TRIES`.
        """
        body = _encode(
            {
                "request_id": request_id,
                "token_ids": token_ids,
                "sampling_params": sampling,
                "min_version": min_version,
            }
        )
        headers = {**HEADERS, "X-Session-ID": session_id}
        backoff_s = BACKOFF_FIRST_S
        trouble = "it was never tried"
        for attempt in range(MAX_TRIES):
            if attempt:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            try:
                status, answer, retry_after_s = await self._post(body, headers)
            except (aiohttp.ClientError, OSError) as error:
                # A timeout of the whole request is a TimeoutError, which is an OSError.
                trouble = f"{type(error).__name__} {error}".strip()
                continue
            if status == 200:
                return _turn(answer)
            trouble = _message(status, answer)
            if status not in RETRIED:
                raise _refusal(status, trouble)
            backoff_s = max(backoff_s, retry_after_s)
        raise GatewayUnavailable(
            f"{self._url} did not answer {request_id} in {MAX_TRIES} tries: {trouble}"
        )

    async def _post(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, float]:
        """Status, body and Retry-After in seconds (at most `BACKOFF_MAX_S`)."""
        if self._session is None:
            raise RolloutError("use `async with RolloutClient(...)` before generate()")
        async with self._session.post(self._url, data=body, headers=headers) as response:
            after = response.headers.get("Retry-After", "")
            retry_after_s = float(after) if after.isdigit() else 0.0
            return response.status, await response.read(), min(retry_after_s, BACKOFF_MAX_S)


def _turn(body: bytes) -> Turn:
    try:
        answer = _decode_answer(body)
    except msgspec.MsgspecError as error:
        raise RolloutError(f"the gateway's answer is not a turn: {error}") from error
    choice = answer.choices[0]
    return Turn(
        request_id=answer.request_id,
        token_ids=choice.token_ids,
        logprobs=tuple([token.logprob for token in choice.logprobs.content]),
        versions=tuple([(span.version, span.start, span.end) for span in answer.versions]),
        segments=tuple([(s.replica, s.kind, s.start, s.end) for s in answer.segments]),
        finish_reason=choice.finish_reason,
        attempts=answer.attempts,
    )


def _message(status: int, body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"HTTP {status}"


def _refusal(status: int, message: str) -> RolloutError:
    if status == 409:
        return VersionNotServed(message)
    return RequestRefused(f"HTTP {status}: {message}")
